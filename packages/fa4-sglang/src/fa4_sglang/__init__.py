"""fa4-core's prefill attention as an SGLang attention backend named "fa-cute".

SGLang finds `plugin.register` by its entry point; nothing here is meant to be imported by hand.
"""

__version__ = "0.1.0"
