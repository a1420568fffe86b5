"""What every test suite shares: an oracle, KV layouts as the engines make them, and generators of steps."""

from .layouts import LAYOUTS, make_pages
from .oracle import attention
from .steps import Step, make_step

__all__ = ["LAYOUTS", "Step", "attention", "make_pages", "make_step"]
