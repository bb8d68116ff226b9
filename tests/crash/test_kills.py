"""A bounded number of kills of the real server and its engine, beside those of tests/serve/test_kill.py.

`make crash` does the full number (kills.py).
"""

from __future__ import annotations

import pytest
from tests.crash.kills import FULL_KILLS, kills, one_volume, run, two_filesystems


@pytest.mark.timeout(280)
@pytest.mark.parametrize("volumes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_acknowledged_is_lost_to_a_kill_under_load(tmp_path, volumes) -> None:
    if volumes == 1:
        loop = run(tmp_path, one_volume(tmp_path), kills=6, engine_kills=1)
    else:
        with two_filesystems(tmp_path) as folders:
            loop = run(tmp_path, folders, kills=6, engine_kills=1)
    figures = loop.figures
    assert figures.wrong == []
    assert (figures.kills, figures.engine_kills) == (6, 1)
    assert figures.counts["acknowledged"] > 5 and figures.counts["right"] > 3, figures.counts


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_full_number_of_kills() -> None:
    figures = kills()
    assert figures["kills"] >= FULL_KILLS - 10
    assert not any(figures[name] for name in ("lost", "corrupt", "unaccounted_bytes", "unexplained"))
