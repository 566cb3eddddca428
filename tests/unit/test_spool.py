"""Results on disk: complete or not there, one owner, nothing refused is lost."""

import os
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from runners.spool import Spool, SpoolBusyError

FIRST, SECOND = UUID(int=1), UUID(int=2)


def test_what_is_put_waits_byte_for_byte_for_the_next_life(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        spool.put(FIRST, b'{"answer": 42}\n')
    with Spool(tmp_path) as spool:
        (spooled,) = spool.pending()
        assert (spooled.attempt, spooled.body()) == (FIRST, b'{"answer": 42}\n')


def test_the_oldest_result_comes_first(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        for attempt, seconds in ((FIRST, 20), (SECOND, 10)):
            os.utime(spool.put(attempt, b"{}").path, (seconds, seconds))
        assert [spooled.attempt for spooled in spool.pending()] == [SECOND, FIRST]


def test_a_result_cut_short_by_a_crash_is_never_seen(tmp_path: Path) -> None:
    (tmp_path / f"{uuid4()}.part").write_bytes(b'{"half')
    with Spool(tmp_path) as spool:
        assert spool.pending() == []
    assert not list(tmp_path.glob("*.part"))


def test_a_failed_write_leaves_nothing_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError("no space left on device")

    with Spool(tmp_path) as spool:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            spool.put(FIRST, b"{}")
        assert spool.pending() == []


def test_a_second_daemon_is_turned_away_until_the_first_is_gone(tmp_path: Path) -> None:
    with Spool(tmp_path), pytest.raises(SpoolBusyError, match="another runner"):
        Spool(tmp_path)
    Spool(tmp_path).close()


def test_a_deleted_result_waits_no_more(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        spool.delete(spool.put(FIRST, b"{}"))
        assert spool.pending() == []


def test_a_refused_result_is_set_aside_with_its_reason(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        kept = spool.reject(spool.put(FIRST, b"{}"), "HTTP 422: body.units is wrong")
        assert spool.pending() == []
    assert kept.read_bytes() == b"{}"
    assert "body.units is wrong" in kept.with_name(f"{FIRST}.reason.txt").read_text()


def test_a_file_that_is_no_attempt_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    with Spool(tmp_path) as spool:
        assert spool.pending() == []
    assert (tmp_path / "notes.json").exists()
