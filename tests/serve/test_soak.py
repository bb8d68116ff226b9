"""A short soak of the real server; `make soak` is the long one (tests/soak)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.soak.lives import RETURNING, Soak


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_random_clients_leave_nothing_behind(tmp_path: Path) -> None:
    soak = Soak(tmp_path, seconds=45, seed=1)
    soak.run()
    figures, found = soak.figures, soak.world.found
    assert figures.wrong == []
    assert figures.rests == 4 and figures.restored == RETURNING
    assert found.counts["answers"] >= 12 and found.counts["left"] >= 1, found.counts
    assert figures.cache["restores"] >= 1 and figures.cache["parked_ram"] >= 4, figures.cache
