"""`pagepool doctor`: whether pagepool, its extras and the engines work on this machine, and what to do if not.

It needs no extra itself.
"""

from pagepool.doctor.command import diagnose, main

__all__ = ["diagnose", "main"]
