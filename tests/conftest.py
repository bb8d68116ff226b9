"""What all tests need: signals as a terminal gives them.

A shell that runs the tests in its background, or `nohup`, leaves some ignored, and processes hand that down.
"""

from __future__ import annotations

import signal

for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
