"""Runs the real `strata` command with shorter limits for its end; a program, not a test."""

from __future__ import annotations

import strata.cli.serve
import strata.serve.ending
import strata.serve.wiring
from strata.cli.main import main

if __name__ == "__main__":
    strata.cli.serve.GRACE_S = 1
    strata.serve.ending.SETTLE_LIMIT_S = 1.0
    strata.serve.ending.SILENT_S = strata.serve.wiring.SILENT_S = 2.0
    main()
