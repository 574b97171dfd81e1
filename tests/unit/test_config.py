"""Settings come from file < environment < flags, are checked whole, and a wrong one is named."""

from pathlib import Path
from typing import Any

import pytest

from etserve.config import Config, ControlConfig, EngineConfig, ServerConfig, load_config, spelled_out
from etserve.control.draft import DEMO_RISKS, DraftLaw, VerifyLaw
from etserve.control.priority import PriorityConfig
from etserve.control.pruning import PruningConfig
from etserve.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]


def toml(folder: Path, text: str) -> Path:
    path = folder / "etserve.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_any_source_the_defaults_hold() -> None:
    assert load_config(environment={}) == Config()


def test_the_environment_outranks_the_file_and_flags_outrank_both(tmp_path: Path) -> None:
    path = toml(tmp_path, '[engine]\nthreads = 1\nmax_num_seqs = 11\nmodel = "file"\n[server]\nport = 1\n')
    environment = {"ETSERVE_MAX_NUM_SEQS": "22", "ETSERVE_MODEL": "variable", "ETSERVE_PORT": "2"}
    config = load_config(path, {"engine": {"model": "flag"}, "server": {"port": "3"}}, environment)
    assert (config.engine.threads, config.engine.max_num_seqs, config.engine.model) == (1, 22, "flag")
    assert config.server.port == 3


def test_a_flag_that_was_not_given_changes_nothing() -> None:
    config = load_config(None, {"engine": {"model": None, "threads": None}}, {"ETSERVE_THREADS": "3"})
    assert config.engine == EngineConfig(threads=3)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("prefix_caching", "false", False),
        ("prefix_caching", "1", True),
        ("memory_fraction", "0.25", 0.25),
        ("max_model_len", "1024", 1024),
        ("dtype", "float32", "float32"),
        ("api_keys", "one, two,,", ("one", "two")),
        ("allowed_hosts", "a.example,b.example", ("a.example", "b.example")),
        ("insecure", "true", True),
    ],
)
def test_variables_are_text_and_become_the_fields_type(field: str, text: str, value: Any) -> None:
    config = load_config(environment={"ETSERVE_" + field.upper(): text})
    section = config.engine if field in EngineConfig.__struct_fields__ else config.server
    assert getattr(section, field) == value


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("engine", "threads", -1),
        ("engine", "max_num_seqs", 0),
        ("engine", "max_step_tokens", 15),
        ("engine", "memory_fraction", 0.0),
        ("engine", "memory_fraction", 1.5),
        ("engine", "memory_fraction", "nan"),
        ("engine", "dtype", "int3"),
        ("engine", "max_model_len", "many"),
        ("engine", "max_num_seqs", 1e400),
        ("control", "temperature_mode", "warm"),
        ("control", "target_entropy_nats", -0.1),
        ("control", "target_entropy_nats", "nan"),
        ("control", "epsilon", 0.6),
        ("control", "decode_wait_seconds", 0.0),
        ("server", "port", 65_536),
        ("server", "drain_timeout_seconds", -0.1),
        ("server", "drain_timeout_seconds", "inf"),
        ("server", "log_level", "chatty"),
        ("server", "insecure", "perhaps"),
    ],
)
def test_a_wrong_value_stops_the_start_and_names_the_field(section: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{section}.{field}"):
        load_config(None, {section: {field: value}}, {})


@pytest.mark.parametrize("kv_dtype", ["int8", "float32"])
def test_on_a_gpu_a_kv_cache_of_another_dtype_than_the_weights_is_refused(kv_dtype: str) -> None:
    engine = {"device": "cuda", "kv_dtype": kv_dtype}
    for more in ({}, {"dtype": "bfloat16"}):
        with pytest.raises(ConfigError, match=f"kv_dtype {kv_dtype}: .*weights' dtype"):
            load_config(None, {"engine": {**engine, **more}}, {})
    assert load_config(None, {"engine": {**engine, "backend": "torch"}}, {}).engine.kv_dtype == kv_dtype
    load_config(None, {"engine": {"device": "cuda", "kv_dtype": "float32", "dtype": "float32"}}, {})


def test_verification_without_anything_to_skip_by_is_refused() -> None:
    with pytest.raises(ConfigError, match="verify takes pruning_sketch_bits"):
        load_config(None, {"control": {"verify": "bounded"}}, {})
    load_config(None, {"control": {"verify": "bounded"}, "engine": {"pruning_sketch_bits": 2}}, {})


def test_an_unknown_field_or_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="threds"):
        load_config(toml(tmp_path, "[engine]\nthreds = 2\n"), environment={})
    with pytest.raises(ConfigError, match="motor"):
        load_config(toml(tmp_path, "[motor]\nthreads = 2\n"), environment={})


@pytest.mark.parametrize("text", ["engine = 3\n", "[engine\n", "threads = 2\n", "[[engine]]\nthreads = 2\n"])
def test_a_file_of_another_shape_is_a_config_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_config(toml(tmp_path, text), {"engine": {"model": "x"}, "server": {}}, {"ETSERVE_THREADS": "1"})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        load_config(tmp_path / "absent.toml", environment={})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        load_config(tmp_path / "binary.toml", environment={})


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().engine.threads = 2  # type: ignore[misc]


def test_the_shipped_file_spells_out_the_defaults() -> None:
    assert load_config(REPOSITORY / "configs" / "default.toml", environment={}) == Config()


def test_the_shipped_file_mentions_every_setting() -> None:
    text = (REPOSITORY / "configs" / "default.toml").read_text(encoding="utf-8")
    fields = {*EngineConfig.__struct_fields__, *ControlConfig.__struct_fields__, *ServerConfig.__struct_fields__}
    fields.remove("control")  # a table of its own
    assert [name for name in fields if f"\n{name} = " not in text and f"\n# {name} = " not in text] == []


@pytest.mark.parametrize("name", ["baseline", "entropic", "paper"])
def test_the_shipped_arms_load(name: str) -> None:
    control = load_config(REPOSITORY / "configs" / f"{name}.toml", environment={}).control
    assert (control == ControlConfig()) is (name == "baseline")


def test_the_control_table_is_merged_as_the_others_are(tmp_path: Path) -> None:
    path = toml(tmp_path, '[control]\nepsilon = 0.2\npriority_mode = "paper"\n')
    config = load_config(path, {"control": {"priority_mode": "random"}}, {"ETSERVE_EPSILON_SWING": "0"})
    assert config.control == ControlConfig(epsilon=0.2, priority_mode="random", epsilon_swing=0.0)
    assert config.engine.control is config.control


def test_the_control_table_has_one_place_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="control"):
        load_config(toml(tmp_path, "[engine.control]\nepsilon = 0.2\n"), environment={})


@pytest.mark.parametrize(
    "control",
    [
        {"temperature_mode": "cool"},
        {"temperature_mode": "mirostat"},
        {"gain_weight": 0.7, "finish_weight": 0.7},
        {"entropy_low_nats": 3.0, "entropy_high_nats": 2.0},
        {"epsilon": 0.5, "epsilon_swing": 1.0},
    ],
)
def test_what_the_laws_refuse_together_stops_the_start(control: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="control"):
        load_config(None, {"control": control}, {})


def test_the_laws_own_defaults_are_the_settings() -> None:
    assert ControlConfig().pruning_law() == PruningConfig()
    assert ControlConfig().priority_law() == PriorityConfig()
    assert ControlConfig().draft_law() == DraftLaw()
    assert ControlConfig().verify_law("bounded") == VerifyLaw("bounded")


def test_pairs_are_spelt_with_colons_where_there_is_only_text(tmp_path: Path) -> None:
    pairs = ((0.8, 0.001), (4.5, 0.007))
    path = toml(tmp_path, "[control]\nverify_risks_nats = [[0.8, 0.001], [4.5, 0.007]]\n")
    variable = {"ETSERVE_VERIFY_RISKS_NATS": "0.8:0.001, 4.5:0.007,"}
    flag = {"control": {"verify_risks_nats": spelled_out("verify_risks_nats", "0.8:0.001,4.5:0.007")}}
    for found in (load_config(path, environment={}), load_config(None, {}, variable), load_config(None, flag, {})):
        assert found.control.verify_risks_nats == pairs
        assert found.control.risk_table().risk_nats(9.0) == 0.007
    assert ControlConfig().risk_table() == DEMO_RISKS


@pytest.mark.parametrize("text", ["1", "1:2:3", "2:0.1,1:0.1", "0:0.1", "1:-0.1", "1:x", "nan:0.1", "inf:0.1"])
def test_a_table_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"verify_risks_nats|risk table"):
        load_config(environment={"ETSERVE_VERIFY_RISKS_NATS": text})
