"""Files are written whole or not at all."""

import os
import threading
from pathlib import Path

import pytest

from pagepool.replay.shared.output import open_output


def test_it_takes_its_place_at_the_end_with_the_rights_of_any(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    for before in (None, "before"):
        with open_output(path) as file:
            file.write(b"after")
            file.flush()
            assert (path.read_text() if path.exists() else None) == before
        assert path.read_text() == "after"
        assert [*tmp_path.iterdir()] == [path]
        path.write_text("before")
    (tmp_path / "any").touch()
    assert path.stat().st_mode == (tmp_path / "any").stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_all_as_it_was(error: type[BaseException], tmp_path: Path) -> None:
    def fail() -> None:
        with open_output(path) as file:
            file.write(b"half")
            raise error

    path = tmp_path / "figures.json"
    path.write_text("before")
    with pytest.raises(error):
        fail()
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


def test_a_link_keeps_leading_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with open_output(tmp_path / "link") as file:
        file.write(b"text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_devices_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    reading_end, terminal = os.openpty()  # a device of our own: a mutant that replaced /dev/null would harm the machine
    device = Path(os.ttyname(terminal))
    with open_output(device) as file:
        file.write(b"text")
    assert not device.is_file()
    assert os.read(reading_end, 4) == b"text"
    os.close(reading_end)
    os.close(terminal)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with open_output(pipe) as file:
        file.write(b"text")
    reader.join()
    assert read == [b"text"]
