"""llama-server, the peer of `make bench-serve`: the one inside the package xllamacpp, until a signal ends it.

What is not a flag here is llama-server's default. `--cache-ram 0` turns off its copies of idle conversations in RAM.
"""

from __future__ import annotations

import argparse
import signal
from importlib.util import find_spec

from strata.serve.wiring import find_model

INSTALL = "llama-server comes with the package xllamacpp: .venv/bin/python -m pip install xllamacpp"


def check_installed() -> None:
    if find_spec("xllamacpp") is None:
        raise SystemExit(INSTALL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048, help="tokens per slot")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-ram", type=int, default=0, help="MiB")
    given = parser.parse_args()
    check_installed()
    import xllamacpp  # a development dependency: the other benchmarks do without

    params = xllamacpp.CommonParams()
    params.model.path = str(find_model("demo"))
    params.port = given.port
    params.n_parallel = given.parallel
    params.n_ctx = given.parallel * given.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F16
    params.cache_ram_mib = given.cache_ram
    params.fit_params = False  # it would try context sizes until one fits this machine
    stop = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # before its threads start, which inherit it
    server = xllamacpp.Server(params)
    signal.sigwait(stop)
    del server


if __name__ == "__main__":
    main()
