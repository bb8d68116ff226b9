"""Settings: parsing, precedence, names, the rules between settings, and what is shown of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from strata import coherence
from strata.config import SETTINGS, Config, env_name, info_line
from strata.errors import ConfigError
from strata.serve.wiring import Server
from strata.sources import load
from strata.store import names

DEMO = {"model": ["demo"]}
SWITCH_WORDS = {"": False, "0": False, "false": False, "off": False, "no": False, "No": False}
SWITCH_WORDS |= {"1": True, "true": True, "on": True, "yes": True, "TRUE": True}


def flags(**given: str) -> dict[str, list[str]]:
    """Flags as the command line gives them, with a model so that they can be complete."""
    return {**DEMO, **{name.replace("_", "-"): [text] for name, text in given.items()}}


def message_of(given: dict[str, Any], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(given, environ or {})
    assert caught.value.exit_code == 2
    return caught.value.message


def test_nothing_set_keeps_every_default_and_no_level() -> None:
    config = load(DEMO, {})
    assert config == Config(model="demo")
    assert config.cold_dir_in_use is None
    assert (config.host, config.port, config.api_key, config.warnings) == ("127.0.0.1", 8080, (), ())


def test_the_defaults_of_the_cache() -> None:
    config = load(DEMO, {})
    assert (config.conversation_cache_mib, config.conversation_cache_slots) == (0, 4)
    assert (config.conversation_cache_min_free_mib, config.conversation_cache_park_min_free_mib) == (2560, 512)
    assert (config.conversation_cache_cold_mib, config.conversation_cache_warm_mib) == (8192, 0)
    assert (config.conversation_cache_spill_on, config.conversation_cache_spill_when_full) == ("park", "evict-oldest")
    assert (config.conversation_cache_spill_max_age_days, config.conversation_cache_spill_park_throttle_s) == (0, 0)
    assert config.conversation_cache_spill_divergence_tokens == 4096
    assert (config.conversation_cache_archive_mode, config.conversation_cache_archive_mib) == ("off", 2048)
    assert (config.conversation_cache_archive_keep, config.conversation_cache_archive_max_age_days) == (4, 0)
    assert (config.conversation_cache_park, config.conversation_cache_reserve_mib) == ("ram", 0)
    assert config.warm_dir_in_use is config.last_dir_in_use is config.archive_dir_in_use is None
    assert config.park_target == "ram"


def test_a_model_is_needed() -> None:
    assert "--model is missing" in message_of({})


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "strata.toml"
    file.write_text('model = "demo"\nport = 1\nparallel = 2\nthreads = 3\n')
    environ = {"STRATA_CONFIG": str(file), "STRATA_PORT": "11", "STRATA_PARALLEL": "12"}
    config = load({"port": ["21"]}, environ)
    assert (config.port, config.parallel, config.threads, config.context) == (21, 12, 3, None)
    assert config.config == file


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("port", "0", 0),
        ("parallel", "128", 128),
        ("context", "auto", None),
        ("context", "4096", 4096),
        ("flash_attention", "on", "on"),
        ("kv", "q8_0", ("q8_0", "q8_0")),
        ("kv", "q8_0,f16", ("q8_0", "f16")),
        ("layer_split", "auto", None),
        ("layer_split", "3", (3.0,)),
        ("layer_split", "1,0,2.5", (1.0, 0.0, 2.5)),
        ("threads", "8", 8),
        ("gpu_layers", "0", 0),
        ("turn_token", "none", "none"),
        ("turn_token", "128009", "128009"),
        ("host", "localhost", "localhost"),
        ("host", "::1", "::1"),
        ("host", "127.9.9.9", "127.9.9.9"),
        ("conversation_cache_similarity", "0.999", 0.999),
        ("conversation_cache_similarity", "1e-3", 0.001),
        ("conversation_cache_n_min", "256", 256),
        ("conversation_cache_mib", "1048576", 1 << 20),
        ("conversation_cache_slots", "1", 1),
        ("conversation_cache_min_free_mib", "512", 512),
        ("conversation_cache_park", "auto", "auto"),
        ("conversation_cache_park_min_free_mib", "0", 0),
        ("conversation_cache_spill_on", "evict", "evict"),
        ("conversation_cache_spill_when_full", "reject", "reject"),
        ("conversation_cache_spill_max_age_days", "36500", 36500),
        ("conversation_cache_archive_mode", "ids", "ids"),
        ("conversation_cache_archive_keep", "0", 0),
        ("conversation_cache_cold_dir", "", None),
        ("conversation_cache_cold_dir", "/a/b/../c/", Path("/a/c")),
        ("conversation_cache_cold_dir", "~", Path.home()),
        ("conversation_cache_cold_dir", "x", Path.cwd() / "x"),
    ],
)
def test_values_are_parsed(name: str, text: str, value: Any) -> None:
    assert getattr(load(flags(**{name: text}), {}), name) == value


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("port", ["8GB", "1e9", "", "-1", "65536", " 80", "8_080", "80.0", "٨٠", "9" * 5000, "auto", "0x50"]),
        ("parallel", ["0", "-1", "129", "two"]),
        ("context", ["0", "31", "1.5", "AUTO"]),
        ("flash-attention", ["", "true", "ON"]),
        ("kv", ["", "f16,", "f16,f16,f16", "q3_0", "F16"]),
        ("layer-split", ["", "0", "0,0", "-1,2", "1,,2", "1,", "1e3", "nan", "inf", "1 1", "one", ",".join("1" * 17)]),
        ("turn-token", ["", "-5", "<|im_start|>", "2147483648"]),
        ("host", ["", "a b", "http://x", "host/"]),
        ("model", ["", "hf:org/model/file.gguf", "a\0b"]),
        ("api-key", ["", "two words", "schlüssel", "tab\t"]),
        ("api-key-file", [""]),
        ("config", [""]),
        ("no-auth", ["maybe", "2", "-1"]),
        ("conversation-cache-cold-mib", ["8GB", "8GiB", "1e9", "-1", "unlimited", ""]),
        ("conversation-cache-similarity", ["1", "1.0", "-0.1", "nan", "inf", "0,5", "", "1e0", "0_0"]),
        ("conversation-cache-n-min", ["-1", "2147483648"]),
        ("conversation-cache-mib", ["8GB", "-1", "unlimited", "1073741825"]),
        ("conversation-cache-slots", ["0", "-1"]),
        ("conversation-cache-min-free-mib", ["-1", "2.5"]),
        ("conversation-cache-park", ["", "RAM", "vram", "ram,disk"]),
        ("conversation-cache-park-min-free-mib", ["-1", "auto"]),
        ("conversation-cache-warm-mib", ["-1", "1 GiB"]),
        ("conversation-cache-spill-on", ["", "always"]),
        ("conversation-cache-spill-when-full", ["evict", "oldest"]),
        ("conversation-cache-spill-max-age-days", ["-1", "36501", "0.5"]),
        ("conversation-cache-spill-divergence-tokens", ["-1", "2147483648"]),
        ("conversation-cache-spill-park-throttle-s", ["-1", "1.5"]),
        ("conversation-cache-archive-mode", ["on", "", "all"]),
        ("conversation-cache-archive-mib", ["-1"]),
        ("conversation-cache-archive-keep", ["-1", "all"]),
        ("conversation-cache-archive-max-age-days", ["-1"]),
        ("conversation-cache-reserve-mib", ["-1", "half"]),
    ],
)
def test_a_bad_value_is_refused_with_flag_value_and_range(name: str, texts: list[str]) -> None:
    setting = next(setting for setting in SETTINGS if setting.name == name)
    for text in texts:
        message = message_of({**DEMO, name: [text]})
        assert message.startswith(f"--{name}"), message
        assert setting.kind.expects in message
        assert repr(text) in message or name == "api-key"


def test_a_bad_key_is_not_shown() -> None:
    assert "two" not in message_of({**DEMO, "api-key": ["two words"]})


def test_the_origin_of_a_bad_value_is_named(tmp_path: Path) -> None:
    file = tmp_path / "strata.toml"
    file.write_text("port = 70000\n")
    assert message_of(DEMO, {"STRATA_PORT": "x"}).startswith("STRATA_PORT is 'x'")
    assert message_of({**DEMO, "config": [str(file)]}).startswith(f"port in {file} is '70000'")


@pytest.mark.parametrize(("text", "value"), SWITCH_WORDS.items())
def test_a_switch_knows_these_spellings_from_everywhere(tmp_path: Path, text: str, value: bool) -> None:
    file = tmp_path / "strata.toml"
    file.write_text(f'no-auth = "{text}"\n')
    assert load(flags(no_auth=text), {}).no_auth is value
    assert load(DEMO, {"STRATA_NO_AUTH": text}).no_auth is value
    assert load(flags(config=str(file)), {}).no_auth is value


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("no-auth = true", "no_auth", True),
        ("no_auth = false", "no_auth", False),
        ("port = 9", "port", 9),
        ('port = "9"', "port", 9),
        ("conversation-cache-similarity = 0.25", "conversation_cache_similarity", 0.25),
        ('api-key = ["a", "b"]', "api_key", ("a", "b")),
        ('api-key = "a"', "api_key", ("a",)),
        ("conversation-cache-disk-mib = 0", "conversation_cache_cold_mib", 0),
    ],
)
def test_the_file_takes_toml_values(tmp_path: Path, line: str, field: str, value: Any) -> None:
    file = tmp_path / "strata.toml"
    file.write_text(line + "\n")
    assert getattr(load(flags(config=str(file)), {}), field) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prt = 1", "prt is not a setting; did you mean port?"),
        ("[serve]\nport = 1", "serve is not a setting"),
        ('config = "x"', "config is not a setting"),
        ("port = true", "port in "),
        ("port = 1.0", "port in "),
        ("port = [1, 2]", "port must be one value, not list"),
        ("port = 2026-01-01", "port must be one value, not date"),
        ("no-auth = 2", "no-auth in "),
        ("port = ", "not TOML"),
        ("port = 1\nport = 2", "not TOML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "strata.toml"
    file.write_text(text)
    assert expected in message_of(flags(config=str(file)))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.toml")
    assert missing in message_of(flags(config=missing))
    assert str(tmp_path) in message_of(flags(config=str(tmp_path)))
    assert missing in message_of(flags(api_key_file=missing))


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        ({"conversation-cache-cold-dir": ["/a/b"]}, {"conversation-cache-spill-dir": ["/a/./x/../b/"]}, True),
        ({"conversation-cache-cold-dir": ["/a/b"]}, {"conversation-cache-spill-dir": ["/a/c"]}, False),
        ({"conversation-cache-cold-mib": ["5"]}, {"conversation-cache-disk-mib": ["05"]}, True),
        ({"conversation-cache-cold-mib": ["5"]}, {"conversation-cache-disk-mib": ["6"]}, False),
        ({"conversation-cache-cold-mib": ["5"]}, {"conversation-cache-disk-mib": ["0"]}, False),
    ],
)
def test_two_names_of_one_setting_must_agree(
    tmp_path: Path, one: dict[str, list[str]], other: dict[str, list[str]], agree: bool
) -> None:
    both = one | other
    file = tmp_path / "strata.toml"
    file.write_text("".join(f'{name} = "{texts[0]}"\n' for name, texts in both.items()))
    environ = {env_name(name): texts[0] for name, texts in both.items()}
    for given in (({**DEMO, **both}, {}), (DEMO, environ), ({**DEMO, "config": [str(file)]}, {})):
        if agree:
            assert load(*given) == dataclasses.replace(load({**DEMO, **one}, {}), config=load(*given).config)
        else:
            message = message_of(*given)
            assert "two names of one setting" in message
            assert all(name in message.lower().replace("_", "-") for name in both)


def test_a_flag_under_one_name_beats_the_environment_under_the_other() -> None:
    given = {**DEMO, "conversation-cache-spill-dir": ["/flag"]}
    config = load(given, {"STRATA_CONVERSATION_CACHE_COLD_DIR": "/env"})
    assert config.conversation_cache_cold_dir == Path("/flag")


def test_a_flag_given_twice_counts_last_and_keys_add_up() -> None:
    config = load({**DEMO, "port": ["1", "2"], "api-key": ["a", "b"]}, {})
    assert (config.port, config.api_key) == (2, ("a", "b"))


def test_an_unknown_environment_variable_is_a_warning() -> None:
    config = load(DEMO, {"STRATA_PROT": "1", "STRATA_NO_LARGEPAGES": "1", "PORT": "5"})
    assert [w for w in config.warnings if "STRATA_PROT" in w and "STRATA_PORT" in w] == list(config.warnings)
    assert len(config.warnings) == 1
    assert config.port == 8080


def test_the_agenda_s_knobs_reach_the_engine_from_the_environment_and_from_flags() -> None:
    plain = Server(load(DEMO, {}))._settings()
    assert (plain.agenda, plain.agenda_chunk, plain.agenda_budget, plain.agenda_age, plain.decode_share) == (
        False, 512, 520, 4, None
    )  # fmt: skip
    environ = {"STRATA_BATCH_AGENDA": "1", "STRATA_BATCH_AGENDA_CHUNK": "64", "STRATA_BATCH_AGENDA_BUDGET": "72"}
    environ |= {"STRATA_BATCH_AGENDA_AGE": "2", "STRATA_BATCH_DECODE_SHARE": "0.5"}
    set_ = Server(load(flags(batch_agenda_age="3"), environ))._settings()
    assert (set_.agenda, set_.agenda_chunk, set_.agenda_budget, set_.agenda_age, set_.decode_share) == (
        True, 64, 72, 3, 0.5
    )  # fmt: skip
    with pytest.raises(ConfigError, match="STRATA_BATCH_DECODE_SHARE is '1'"):
        load(DEMO, {"STRATA_BATCH_DECODE_SHARE": "1"})


@pytest.mark.parametrize(("text", "is_on"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_ladder_is_switched_on_by_the_environment(text: str | None, is_on: bool) -> None:
    config = load(DEMO, {} if text is None else {"STRATA_RESTORE_LADDER": text})
    assert config.restore_ladder is is_on
    assert not config.warnings


def test_a_ladder_that_is_neither_on_nor_off_is_refused() -> None:
    with pytest.raises(ConfigError, match="STRATA_RESTORE_LADDER is 'yes'"):
        load(DEMO, {"STRATA_RESTORE_LADDER": "yes"})


def test_a_directory_without_a_budget_is_a_warning_that_names_both() -> None:
    config = load(flags(conversation_cache_spill_dir="/d", conversation_cache_disk_mib="0"), {})
    assert config.cold_dir_in_use is None
    (warning,) = config.warnings
    assert "--conversation-cache-cold-dir /d" in warning
    assert "--conversation-cache-cold-mib" in warning


def cache(**given: str) -> dict[str, list[str]]:
    """Flags of the conversation cache."""
    return flags(**{f"conversation_cache_{name}": text for name, text in given.items()})


COLD = {"cold_dir": "/cold"}
WARM = {"warm_dir": "/warm", "warm_mib": "10"}


@pytest.mark.parametrize(
    ("given", "warm", "cold", "last"),
    [
        ({}, None, None, None),
        (COLD, None, "/cold", "/cold"),
        (WARM, "/warm", None, "/warm"),
        (COLD | WARM, "/warm", "/cold", "/cold"),
        (COLD | WARM | {"cold_mib": "0"}, "/warm", None, "/warm"),
        (COLD | WARM | {"warm_mib": "0"}, None, "/cold", "/cold"),
    ],
)
def test_which_levels_are_on(given: dict[str, str], warm: str | None, cold: str | None, last: str | None) -> None:
    config = load(cache(**given), {})
    shown = [config.warm_dir_in_use, config.cold_dir_in_use, config.last_dir_in_use]
    assert shown == [path and Path(path) for path in (warm, cold, last)]
    assert len(config.warnings) == ("0" in given.values())


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        (
            {"warm_dir": "/w"},
            "--conversation-cache-warm-dir /w is not used: --conversation-cache-warm-mib is 0; give it a budget",
        ),
        (
            {"warm_mib": "7"},
            "--conversation-cache-warm-mib 7 is not used: --conversation-cache-warm-dir is empty",
        ),
        (
            COLD | {"archive_dir": "/a"},
            "--conversation-cache-archive-dir /a is not used: --conversation-cache-archive-mode is off",
        ),
        (
            COLD | {"archive_dir": "/a", "archive_mode": "ids", "archive_mib": "0"},
            "--conversation-cache-archive-dir /a is not used: --conversation-cache-archive-mib is 0",
        ),
        (
            COLD | {"archive_mode": "ids", "archive_mib": "0"},
            "--conversation-cache-archive-mode ids is not used: --conversation-cache-archive-mib is 0",
        ),
        (
            {"archive_mode": "state"},
            "--conversation-cache-archive-mode state is not used: no level on disk is in use "
            "(--conversation-cache-cold-dir or --conversation-cache-warm-dir, with a budget)",
        ),
        (
            {"archive_dir": "/a", "archive_mode": "state", "mib": "100"},
            "--conversation-cache-archive-dir /a is not used: no level on disk is in use "
            "(--conversation-cache-cold-dir or --conversation-cache-warm-dir, with a budget)",
        ),
        (
            {"park": "disk", "mib": "100"},
            "--conversation-cache-park disk acts as ram: no level on disk is in use "
            "(--conversation-cache-cold-dir or --conversation-cache-warm-dir, with a budget)",
        ),
        (
            {"park_min_free_mib": "300", "min_free_mib": "299"},
            "--conversation-cache-park-min-free-mib 300 is more than --conversation-cache-min-free-mib 299: "
            "299 is used for both",
        ),
    ],
)
def test_what_is_given_in_vain_is_a_warning_that_names_why(given: dict[str, str], warning: str) -> None:
    config = load(cache(**given), {})
    assert config.warnings == (warning,)
    assert config.archive_dir_in_use is None


def test_every_reason_shows_where_there_are_several() -> None:
    config = load(cache(cold_dir="/c", cold_mib="0", warm_dir="/w", park="disk", archive_mode="ids"), {"STRATA_X": ""})
    assert len(config.warnings) == 5


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ({"mib": "9"}, "ram"),
        ({"mib": "9", "park": "disk"}, "ram"),
        ({"mib": "9", "park": "auto"}, "ram"),
        ({"mib": "9"} | COLD, "ram"),
        ({"mib": "9", "park": "auto"} | COLD, "auto"),
        ({"mib": "9", "park": "disk"} | COLD, "disk"),
        ({"mib": "9", "park": "disk"} | WARM, "disk"),
        ({"mib": "9", "park": "disk", "cold_mib": "0"} | COLD, "ram"),
        (COLD, "disk"),
        ({"park": "auto"} | WARM, "disk"),
    ],
)
def test_where_parks_go_as_far_as_the_settings_decide(given: dict[str, str], target: str) -> None:
    assert load(cache(**given), {}).park_target == target


@pytest.mark.parametrize(
    ("parking", "transient", "used"), [("512", "512", 512), ("511", "512", 511), ("0", "512", 0), ("2560", "0", 0)]
)
def test_the_transient_floor_is_never_above_the_parking_floor(parking: str, transient: str, used: int) -> None:
    config = load(cache(min_free_mib=parking, park_min_free_mib=transient), {})
    assert config.conversation_cache_park_min_free_mib == used
    assert len(config.warnings) == (used < int(transient))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"cold_dir": "/a/b", "warm_dir": "/a/x/../b/"}, ("warm-dir", "cold-dir", "one directory")),
        ({"cold_dir": "/a", "warm_dir": "/a", "warm_mib": "5"}, ("warm-dir", "cold-dir", "one directory")),
        ({"cold_dir": "/a", "warm_dir": "/a/seg", "warm_mib": "5"}, ("warm-dir", "cold-dir", "one inside the other")),
        ({"cold_dir": "/a/b", "warm_dir": "/a"}, ("warm-dir", "cold-dir", "one inside the other")),
        ({"cold_dir": "/a", "warm_dir": "/a/archive"}, ("warm-dir", "cold-dir", "one inside the other")),
        ({"cold_dir": "/a", "archive_dir": "/a"}, ("archive-dir", "cold-dir", "one directory")),
        ({"warm_dir": "/a", "archive_dir": "/a", "archive_mode": "ids"}, ("archive-dir", "warm-dir", "one directory")),
        ({"cold_dir": "/a", "archive_dir": "/a/old"}, ("archive-dir", "cold-dir", "one inside the other")),
        ({"cold_dir": "/a", "archive_dir": "/a/archive/x"}, ("archive-dir", "cold-dir", "one inside the other")),
        ({"cold_dir": "/a/cold", "archive_dir": "/a"}, ("archive-dir", "cold-dir", "one inside the other")),
    ],
)
def test_levels_and_archive_need_directories_of_their_own(given: dict[str, str], named: tuple[str, ...]) -> None:
    message = message_of(cache(**given))
    assert all(part in message for part in named)


def test_a_link_to_a_level_s_directory_is_that_directory(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "cold", target_is_directory=True)
    given = cache(cold_dir=str(tmp_path / "cold"), warm_dir=str(tmp_path / "link"), warm_mib="5")
    assert "one directory" in message_of(given)


def test_directories_with_one_beginning_are_two() -> None:
    config = load(cache(cold_dir="/a/cold", warm_dir="/a/cold-2", warm_mib="5", archive_dir="/a/cold-archive"), {})
    assert (config.cold_dir_in_use, config.warm_dir_in_use) == (Path("/a/cold"), Path("/a/cold-2"))


@pytest.mark.parametrize(
    ("given", "archive"),
    [
        (COLD, "/cold/archive"),
        (WARM, "/warm/archive"),
        (COLD | WARM, "/cold/archive"),
        (COLD | {"archive_dir": "/cold/archive"}, "/cold/archive"),
        (COLD | WARM | {"archive_dir": "/warm/archive"}, "/warm/archive"),
        (COLD | {"archive_dir": "/else"}, "/else"),
    ],
)
def test_where_the_archive_is(given: dict[str, str], archive: str) -> None:
    config = load(cache(archive_mode="state", **given), {})
    assert (config.archive_dir_in_use, config.warnings) == (Path(archive), ())


def test_the_folders_of_archive_and_system_prompts_are_those_that_levels_leave_alone() -> None:
    assert (coherence.ARCHIVE_FOLDER, coherence.SYSTEM_PROMPTS_FOLDER) == names.FOREIGN_FOLDERS


def prompts(**given: str) -> dict[str, list[str]]:
    """Flags of the system-prompt cache, switched on, and of the conversation cache where their names say so."""
    names = {name: name if name.startswith("conversation") else f"system_prompt_cache_{name}" for name in given}
    return flags(system_prompt_cache="on", **{names[name]: text for name, text in given.items()})


def test_the_defaults_of_the_system_prompts() -> None:
    config = load(DEMO, {})
    assert config.system_prompt_cache is False
    assert (config.system_prompt_cache_mib, config.system_prompt_cache_slots) == (2048, 2)
    assert (config.system_prompt_cache_max_age_days, config.system_prompt_cache_key) == (0, "")
    assert config.system_prompt_cache_dir is config.system_prompt_dir_in_use is None


@pytest.mark.parametrize(
    ("given", "tail"),
    [
        ({}, ("strata", "system-prompts")),
        ({"dir": "/roots"}, ("/", "roots")),
        ({"conversation_cache_cold_dir": "/cold"}, ("/", "cold", "system-prompts")),
        ({"conversation_cache_cold_dir": "/cold", "conversation_cache_cold_mib": "0"}, ("strata", "system-prompts")),
        ({"conversation_cache_cold_dir": "/cold", "dir": "/cold/system-prompts"}, ("/", "cold", "system-prompts")),
        ({"conversation_cache_warm_dir": "/w", "conversation_cache_warm_mib": "1"}, ("/", "w", "system-prompts")),
    ],
)
def test_where_the_system_prompts_are(given: dict[str, str], tail: tuple[str, ...]) -> None:
    config = load(prompts(**given), {})
    assert config.system_prompt_dir_in_use is not None
    assert config.system_prompt_dir_in_use.parts[-len(tail) :] == tail
    assert config.public()["system-prompt-cache-dir"] == str(config.system_prompt_dir_in_use)
    assert config.last_dir_in_use is None or "system-prompts" not in config.last_dir_in_use.parts


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"conversation_cache_cold_dir": "/a", "dir": "/a"}, ("cold-dir", "one directory")),
        ({"conversation_cache_cold_dir": "/a", "dir": "/a/seg"}, ("cold-dir", "one inside the other")),
        ({"conversation_cache_warm_dir": "/a", "dir": "/a/x/.."}, ("warm-dir", "one directory")),
        ({"conversation_cache_archive_dir": "/a", "dir": "/a"}, ("archive-dir", "one directory")),
        ({"conversation_cache_archive_dir": "/a", "dir": "/a/system-prompts"}, ("archive-dir", "one inside the other")),
    ],
)
def test_system_prompts_need_a_directory_of_their_own(given: dict[str, str], named: tuple[str, ...]) -> None:
    for switch in ("on", "off"):
        message = message_of(prompts(**given) | {"system-prompt-cache": [switch]})
        assert all(part in message for part in ("--system-prompt-cache-dir", *named))


def test_what_people_save_is_not_among_the_system_prompts() -> None:
    message = message_of(prompts(dir="/a") | {"slot-save-path": ["/a"]})
    assert "--slot-save-path /a and --system-prompt-cache-dir /a are one directory" in message


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        (flags(system_prompt_cache_dir="/d"), "--system-prompt-cache-dir /d is not used: --system-prompt-cache is off"),
        (prompts(mib="0"), "--system-prompt-cache is not used: --system-prompt-cache-mib is 0"),
        (prompts(mib="0", dir="/d"), "--system-prompt-cache-dir /d is not used: --system-prompt-cache-mib is 0"),
    ],
)
def test_system_prompts_that_are_not_kept_are_a_warning(given: dict[str, list[str]], warning: str) -> None:
    config = load(given, {})
    assert config.warnings == (warning,)
    assert config.system_prompt_dir_in_use is None


@pytest.mark.parametrize(
    ("name", "text"),
    [("mib", "-1"), ("slots", "-1"), ("max_age_days", "36501"), ("key", "\n"), ("key", "x" * 201)],
)
def test_bad_settings_of_the_system_prompts_name_the_flag(name: str, text: str) -> None:
    assert f"--system-prompt-cache-{name.replace('_', '-')} is" in message_of(prompts(**{name: text}))


def test_a_budget_without_a_directory_gets_the_platform_s() -> None:
    found = load(flags(conversation_cache_cold_mib="100"), {}).cold_dir_in_use
    assert found is not None
    assert found.parts[-2:] == ("strata", "conversations")
    assert load(flags(conversation_cache_cold_mib="0"), {}).conversation_cache_cold_dir is None


def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# mine\n\n one \ntwo\r\n")
    assert load(flags(api_key="zero", api_key_file=str(file)), {}).api_key == ("zero", "one", "two")
    file.write_text("good\nbad key\n")
    message = message_of(flags(api_key_file=str(file)))
    assert "line 2" in message
    assert "bad key" not in message
    file.write_text("# none\n")
    assert "no key in it" in message_of(flags(api_key_file=str(file)))


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.168.1.5", "myhost", "localhost.example.com", "127.0.0.1.nip.io"]
)
def test_other_machines_may_connect_only_with_a_key_or_when_told(host: str) -> None:
    message = message_of(flags(host=host))
    assert f"--host {host}" in message
    assert "--no-auth" in message
    assert "--api-key" in message
    assert load(flags(host=host, api_key="k"), {}).host == host
    assert load(flags(host=host, no_auth="on"), {}).host == host


def test_no_auth_and_a_key_contradict_each_other() -> None:
    assert "--no-auth contradicts --api-key" in message_of(flags(no_auth="on", api_key="k"))


def test_a_quantised_v_needs_flash_attention() -> None:
    for kv in ("q8_0", "f16,q4_0"):
        message = message_of(flags(kv=kv, flash_attention="off"))
        assert "--kv" in message
        assert "--flash-attention" in message
        assert load(flags(kv=kv), {}).kv[1] != "f16"
    assert load(flags(kv="q8_0,f16", flash_attention="off"), {}).kv == ("q8_0", "f16")


def test_no_key_shows_in_what_is_shown() -> None:
    config = load(flags(api_key="s3cret", conversation_cache_cold_dir="/with space/=x"), {})
    assert "s3cret" not in info_line(config.public()) + repr(config) + repr(config.public())
    parts = dict(part.split("=", 1) for part in info_line(config.public()).split(" "))
    assert unquote(parts["conversation-cache-cold-dir"]) == "/with space/=x"
    assert parts.keys() == {setting.name for setting in SETTINGS}
    assert (parts["api-key"], parts["kv"], parts["threads"], parts["no-auth"]) == ("1%20hidden", "f16", "auto", "off")


def test_what_is_shown_can_be_given_back() -> None:
    config = load(
        flags(
            kv="q8_0,f16", turn_token="5", context="512", conversation_cache_cold_dir="/d", layer_split="20,0,0.000001"
        ),
        {},
    )
    again = {name: [text] for name, text in config.public().items() if text and name != "api-key"}
    assert load(again, {}) == config
    config = load(cache(**COLD, **WARM, mib="5", archive_mode="ids", park="auto"), {})
    again = {name: [text] for name, text in config.public().items() if text and name != "api-key"}
    assert load(again, {}) == config


@pytest.mark.parametrize("path", ["/a", "/a/b", "/"])
@pytest.mark.parametrize("level", ["cold_dir", "warm_dir", "archive_dir"])
def test_sessions_lie_in_no_level(level: str, path: str) -> None:
    assert "--slot-save-path" in message_of(cache(**{level: "/a"}) | flags(slot_save_path=path))


def test_a_reserve_without_a_folder_is_a_warning() -> None:
    assert load(flags(slot_save_path="/s", session_min_free_mib="1"), {}).warnings == ()
    warning = "--session-min-free-mib 1 is not used: --slot-save-path is empty"
    assert load(flags(session_min_free_mib="1"), {}).warnings == (warning,)


def test_a_split_pool_is_not_shared() -> None:
    message = message_of(flags(pool="split", pool_cells="600", parallel="2"))
    assert "--pool-cells 600" in message and "--pool split" in message and "remove one" in message
    assert load(flags(pool="split", parallel="2"), {}).warnings == ()
    assert load(flags(pool="unified", pool_cells="600", parallel="2"), {}).warnings == ()


def test_a_pool_that_stays_unified_is_a_warning() -> None:
    warning = "--pool auto is unified: --pool-cells 600 is shared by all slots"
    assert load(flags(pool="auto", pool_cells="600", parallel="2"), {}).warnings == (warning,)
    for pool in ("auto", "split"):
        assert load(flags(pool=pool), {}).warnings == (f"--pool {pool} is unified: --parallel is 1",)
