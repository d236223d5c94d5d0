"""The modules of the compiled core. `pagepool._core` says what is where."""
