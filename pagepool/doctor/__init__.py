"""`pagepool doctor`: whether pagepool, its extras and the engines work on this machine. It needs no extra itself."""
