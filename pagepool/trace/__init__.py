"""A trace of what the allocator does, in the Chrome trace format, which ui.perfetto.dev opens.

`Recorder` writes it while an engine runs. Needs the extra ``pagepool[events]``.
"""

from pagepool.trace.recorder import Recorder

__all__ = ["Recorder"]
