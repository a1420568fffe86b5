"""The main job: a real model in both real engines, through our backends and through their own, side by side."""
