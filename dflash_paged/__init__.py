"""DFlash's draft context in the target's own paged KV cache."""

__version__ = "0.1.0"
