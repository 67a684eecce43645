"""The mixture file: layers, variables, paths, overrides, groups, temperature; each fault is one line with a remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from omniload.errors import MixtureError
from omniload.mixture import Mixture
from omniload.mixture_file import merge
from omniload.mixture_groups import flatten
from omniload.mixture_schema import json_schema

BASE = {"seq_len": 64, "packs": 4, "sources": {"web": {"path": "web.parquet", "weight": 3}}}


def write(path: Path, text: str | dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text, sort_keys=False))
    return path


def weights(mixture: Mixture) -> dict[str, float]:
    total = sum(spec.weight for spec in mixture.sources.values())
    return {name: spec.weight / total for name, spec in mixture.sources.items()}


# Layers


def test_an_including_file_is_merged_over_the_included_ones_and_paths_start_from_the_file_that_names_them(
    tmp_path: Path,
) -> None:
    write(
        tmp_path / "base/sizes.yaml",
        {"seq_len": 8, "packs": 4, "sources": {"old": {"path": "o", "weight": 1}}},
    )
    web = {"path": ["a/*.parquet", "/abs/b", "s3://c/d"], "weight": 1, "storage_options": {"a": 1, "b": 2}}
    write(tmp_path / "base/more/web.yaml", {"seq_len": 16, "sources": {"web": web}})
    write(
        tmp_path / "m.yaml",
        """
        include: [base/sizes.yaml, base/more/web.yaml]
        packs: 2
        quarantine: bad.jsonl
        sources:
          old: null
          web: {weight: 2, storage_options: {b: 3}}
          code: {path: code/*.jsonl, weight: 1}
        """,
    )
    mixture = Mixture.load(tmp_path / "m.yaml")
    assert (mixture.seq_len, mixture.packs) == (16, 2)
    assert mixture.names == ["code", "web"]
    web_spec = mixture.sources["web"]
    assert web_spec.path == (str(tmp_path / "base/more/a/*.parquet"), "/abs/b", "s3://c/d")
    assert web_spec.weight == 2
    assert web_spec.storage_options == {"a": 1, "b": 3}
    assert mixture.sources["code"].path == (str(tmp_path / "code/*.jsonl"),)
    assert mixture.quarantine == str(tmp_path / "bad.jsonl")


def test_one_file_may_be_included_by_two(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", BASE)
    write(tmp_path / "a.yaml", "include: base.yaml\nseed: 1")
    write(tmp_path / "b.yaml", "include: base.yaml\nsteps: 7")
    mixture = Mixture.load(write(tmp_path / "m.yaml", "include: [a.yaml, b.yaml]"))
    assert (mixture.seed, mixture.steps) == (1, 7)


def test_a_circle_of_includes_is_refused_and_named(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "include: sub/../b.yaml")
    (tmp_path / "sub").mkdir()
    write(tmp_path / "b.yaml", "include: a.yaml")
    with pytest.raises(
        MixtureError, match=r"b\.yaml: include goes round in a circle: .*a\.yaml includes .*b\.yaml"
    ):
        Mixture.load(tmp_path / "a.yaml")
    write(tmp_path / "c.yaml", "include: c.yaml")
    with pytest.raises(MixtureError, match="circle"):
        Mixture.load(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("include: gone.yaml", r"gone\.yaml: no such mixture file, included by .*m\.yaml"),
        ("include: 3", r"m\.yaml: include: a file or a list of files is needed, got 3"),
        ("include: [a, {b: c}]", "include: a file or a list"),
        ("include: .", "cannot be read, included by"),
        ("include: list.yaml", r"list\.yaml: holds no mapping"),
        ("include: bad.yaml", r"bad\.yaml: not valid YAML in line 1"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: &a [*a]", r"m\.yaml: a mapping or list that holds itself; write it out"),
        ("include: loop.yaml", "cannot be read, included by"),
        ("day: 2024-99-99", r"m\.yaml: month must be in"),
    ],
)
def test_a_file_that_cannot_be_included_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    write(tmp_path / "list.yaml", "- a")
    write(tmp_path / "bad.yaml", "a: [")
    with pytest.raises(MixtureError, match=message) as raised:
        Mixture.load(write(tmp_path / "m.yaml", text))
    assert "\n" not in str(raised.value)


json_values = st.recursive(
    st.none() | st.integers(0, 9), lambda inner: st.dictionaries(st.sampled_from("abc"), inner), max_leaves=8
)


@given(
    st.dictionaries(st.sampled_from("abc"), json_values), st.dictionaries(st.sampled_from("abc"), json_values)
)
def test_merging_is_a_json_merge_patch(base: dict[str, Any], patch: dict[str, Any]) -> None:
    """Held against the pseudo-code of RFC 7386, for what is not null: a null over nothing is left for validation."""

    def merge_patch(target: Any, patch: Any) -> Any:
        if not isinstance(patch, dict):
            return patch
        result = dict(target) if isinstance(target, dict) else {}
        for name, value in patch.items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = merge_patch(result.get(name), value)
        return result

    def without_null(value: Any) -> Any:
        return (
            {k: without_null(v) for k, v in value.items() if v is not None}
            if isinstance(value, dict)
            else value
        )

    base = without_null(base)
    assert without_null(merge(base, patch)) == merge_patch(base, patch)


# Variables


def test_variables_stand_for_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOT", "/data")
    monkeypatch.setenv("LENGTH", "128")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("MISSING", raising=False)
    text = """
        seq_len: ${LENGTH}
        packs: ${MISSING:-8}
        sources:
          web: {path: "${ROOT}/web", weight: "${EMPTY:-2}", storage_options: {key: "$${ROOT} $5 $${x"}}
          two: {path: ["x${EMPTY}", "${MISSING:-}y${ROOT}"], weight: 1}
        """
    mixture = Mixture.load(write(tmp_path / "m.yaml", text))
    assert (mixture.seq_len, mixture.packs) == (128, 8)
    web = mixture.sources["web"]
    assert (web.path, web.weight) == (("/data/web",), 2)
    assert web.storage_options == {"key": "${ROOT} $5 ${x"}
    assert mixture.sources["two"].path == (str(tmp_path / "x"), str(tmp_path / "y/data"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "${MISSING}/x",
            r"m\.yaml: sources\.web\.path\.1: the environment has no variable MISSING; set it, or",
        ),
        ("${9}", r"sources\.web\.path\.1: a '\$\{' that is neither"),
        ("${A:-b", "neither"),
        ("a${", "neither"),
    ],
)
def test_a_variable_that_is_missing_or_misspelt_is_named_with_key_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.delenv("MISSING", raising=False)
    sources = {"web": {"path": ["a", value], "weight": 1}}
    with pytest.raises(MixtureError, match=message) as raised:
        Mixture.load(write(tmp_path / "m.yaml", {**BASE, "sources": sources}))
    assert "\n" not in str(raised.value)


def test_a_variable_inside_braces_without_quotes_is_explained(tmp_path: Path) -> None:
    text = "sources:\n  a: {path: ${X}/b, weight: 1}"
    with pytest.raises(
        MixtureError, match=r"not valid YAML in line 2: .*; inside \{…\} a value with \$\{…\} needs"
    ):
        Mixture.load(write(tmp_path / "m.yaml", text))


# Overrides


def test_overrides_replace_the_keys_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(
        tmp_path / "m.yaml",
        {
            **BASE,
            "sources": {
                **BASE["sources"],
                "v1.5": {"path": "a", "weight": 1},
                "v1": {"path": "b", "weight": 1},
            },
        },
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").touch()
    overrides = [
        "sources.web.weight=0.25",
        "sources.v1.5.weight=7",
        "sources.v1=null",
        "sources.new={path: x, weight: 1e-3}",
        "tokenizer=t.json",
        "schedule=[{step: 0}]",
        "seq_len=32",
        "seq_len=128",
        "sources.web.storage_options.deep.key=[1, a]",
    ]
    mixture = Mixture.load(path, overrides=overrides, packs=2)
    assert {name: spec.weight for name, spec in mixture.sources.items()} == {
        "web": 0.25,
        "v1.5": 7,
        "new": 1e-3,
    }
    assert mixture.sources["new"].path == ("x",), "in an override, paths start from the working directory"
    assert mixture.sources["web"].path == (str(tmp_path / "web.parquet"),)
    assert mixture.sources["web"].storage_options == {"deep": {"key": [1, "a"]}}
    assert (mixture.seq_len, mixture.packs, mixture.tokenizer) == (128, 2, "t.json")
    assert [stage.step for stage in mixture.schedule] == [0]
    as_mapping = Mixture.load(path, overrides={"sources.web.weight": 0.5})
    assert as_mapping.sources["web"].weight == 0.5
    assert Mixture.load(mixture, overrides=["packs=6"]).packs == 6


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seqlen=3", r"unknown key 'seqlen'; did you mean 'seq_len'\?"),
        ("sources.web.wieght=3", r"unknown key 'sources\.web\.wieght'; did you mean 'weight'\?"),
        (
            "sources.wbe.weight=3",
            r"override 'sources\.wbe\.weight': no 'wbe' in 'sources'; did you mean 'web'\?",
        ),
        ("seq_len.x=3", r"override 'seq_len\.x': 'seq_len' is no mapping; replace it as a whole"),
        ("schedule.0.step=3", "'schedule' is no mapping"),
        ("seq_len", "override 'seq_len': not of the form key=value"),
        ("=3", "not of the form"),
        ("seq_len=[", r"override 'seq_len': not valid YAML"),
        ("seq_len=many", "seq_len: input should be a valid integer"),
        ("seq_len=${MISSING_IN_TEST}", r"override 'seq_len': seq_len: the environment has no variable"),
        ("sources=null", "'sources' is missing"),
        ("groups.a.weight=1", "no 'a' in 'groups'; there is none"),
    ],
)
def test_a_wrong_override_is_one_clear_line(tmp_path: Path, override: str, message: str) -> None:
    values = {**BASE, "schedule": [{"step": 0}]}
    with pytest.raises(MixtureError, match=message) as raised:
        Mixture.load(write(tmp_path / "m.yaml", values), overrides=[override])
    assert "\n" not in str(raised.value)


# Groups and temperature


def test_groups_share_their_weight_as_their_sources_say(tmp_path: Path) -> None:
    text = """
        seq_len: 8
        packs: 1
        sources: {chat: {path: c, weight: 1}}
        groups:
          web:
            weight: 3
            sources: {common: {path: w/a, weight: 30}, fine: {path: w/b, weight: 10}}
            groups:
              wikis: {weight: 20, sources: {de: {path: w/de, weight: 1}, en: {path: w/en, weight: 3}}}
          none: {weight: 0, sources: {spare: {path: s, weight: 1}}}
        schedule:
          - {step: 5, weights: {chat: 1, web: 1, none: 0}}
          - {step: 9, weights: {chat: 0, common: 1, fine: 0, wikis: 1, none: 0}}
        """
    mixture = Mixture.load(write(tmp_path / "m.yaml", text))
    assert weights(mixture) == pytest.approx(
        {"chat": 1 / 4, "common": 3 / 8, "fine": 1 / 8, "de": 1 / 16, "en": 3 / 16, "spare": 0}
    )
    assert mixture.sources["en"].path == (str(tmp_path / "w/en"),)
    names = mixture.names
    at_5 = dict(zip(names, mixture.weights_at(5), strict=True))
    assert at_5 == pytest.approx(
        {"chat": 1, "common": 1 / 2, "fine": 1 / 6, "de": 1 / 12, "en": 1 / 4, "spare": 0}
    )
    at_9 = dict(zip(names, mixture.weights_at(9), strict=True))
    assert at_9 == {"chat": 0, "common": 1, "fine": 0, "de": 0.25, "en": 0.75, "spare": 0}


def test_temperature_flattens_the_weights_of_its_level(tmp_path: Path) -> None:
    sizes = {"big": 10_000, "mid": 100, "small": 1}
    sources = {name: {"path": name, "weight": size} for name, size in sizes.items()}
    square_root = Mixture.load({"seq_len": 8, "packs": 1, "temperature": 2, "sources": sources})
    assert weights(square_root) == pytest.approx({"big": 100 / 111, "mid": 10 / 111, "small": 1 / 111})
    unchanged = Mixture.load({"seq_len": 8, "packs": 1, "temperature": 1, "sources": sources})
    assert weights(unchanged) == pytest.approx({name: size / 10_101 for name, size in sizes.items()})
    flat = Mixture.load({"seq_len": 8, "packs": 1, "temperature": 1e9, "sources": sources})
    assert weights(flat) == pytest.approx(dict.fromkeys(sizes, 1 / 3))
    group = {"weight": 1, "temperature": 2, "sources": sources}
    other = {"path": "o", "weight": 1}
    nested = Mixture.load({"seq_len": 8, "packs": 1, "groups": {"g": group}, "sources": {"o": other}})
    assert weights(nested) == pytest.approx({"o": 1 / 2, "big": 50 / 111, "mid": 5 / 111, "small": 1 / 222})


@given(
    st.recursive(
        st.dictionaries(st.just("weight"), st.floats(0.01, 100), min_size=1),
        lambda inner: st.fixed_dictionaries(
            {"weight": st.floats(0.01, 100), "members": st.lists(inner, min_size=1, max_size=4)}
        ),
        max_leaves=12,
    )
)
def test_the_shares_of_any_tree_are_products_along_its_paths(tree: dict[str, Any]) -> None:
    expected: dict[str, float] = {}

    def build(node: dict[str, Any], address: str, share: float, level: dict[str, Any]) -> None:
        if "members" not in node:
            level.setdefault("sources", {})[f"s{address}"] = {"path": "x", "weight": node["weight"]}
            expected[f"s{address}"] = share
            return
        inside: dict[str, Any] = {"weight": node["weight"]}
        total = sum(member["weight"] for member in node["members"])
        for i, member in enumerate(node["members"]):
            build(member, f"{address}.{i}", share * member["weight"] / total, inside)
        level.setdefault("groups", {})[f"g{address}"] = inside

    top: dict[str, Any] = {"groups": {}}
    build(tree, "", 1.0, top)
    flat = flatten(top, "m")["sources"]
    total = sum(spec["weight"] for spec in flat.values())
    assert {name: spec["weight"] / total for name, spec in flat.items()} == pytest.approx(expected)


A = {"path": "a", "weight": 1}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"groups": {"g": {"sources": {"a": A}}}}, r"mixture: 'groups\.g\.weight' is missing; add it"),
        (
            {"groups": {"g": {"weight": 1}}},
            r"groups\.g: no source in it has a weight; give it one, or remove the group",
        ),
        (
            {"groups": {"g": {"weight": 1, "sources": {"a": {**A, "weight": 0}}}}},
            "no source in it has a weight",
        ),
        (
            {"groups": {"g": {"weight": 1, "sourcs": {"a": A}}}},
            r"unknown key 'groups\.g\.sourcs'; did you mean 'sources'",
        ),
        (
            {"groups": {"g": {"weight": -1, "sources": {"a": A}}}},
            r"groups\.g\.weight: a number that is not negative",
        ),
        (
            {"groups": {"g": {"weight": "x", "sources": {"a": A}}}},
            "a number that is not negative is needed, got 'x'",
        ),
        (
            {"groups": {"g": {"weight": 1, "sources": {"web": A}}}},
            "sources.web: another source or group has this name; rename",
        ),
        (
            {"groups": {"web": {"weight": 1, "sources": {"a": A}}}},
            r"groups\.web: another source or group has this name",
        ),
        (
            {"groups": {"g": {"weight": 1, "sources": {"a": {**A, "wieght": 2}}}}},
            r"unknown key 'sources\.a\.wieght'",
        ),
        ({"groups": {"g": 3}}, r"groups\.g: a mapping of keys is needed, got 3"),
        ({"groups": [3]}, r"groups: a mapping from names is needed"),
        (
            {"groups": {"g": {"weight": 1, "sources": {"a": None}}}},
            r"groups\.g\.sources\.a: a mapping of keys is needed",
        ),
        ({"temperature": 0}, "temperature: must be above 0; 1 leaves the weights as they are"),
        ({"temperature": "hot"}, "temperature: a number that is not negative is needed, got 'hot'"),
        ({"temperature": 1e-4}, "temperature: 0.0001 leaves 'tiny' nothing; raise it"),
        ({"temperature": 5e-324}, "nothing; raise it"),
        ({"temperature": 0.01}, "the weight of 'tiny', .* is below 1e-08 of the largest"),
        ({"temprature": 2}, r"unknown key 'temprature'; did you mean 'temperature'\?"),
        ({"group": {}}, r"unknown key 'group'; did you mean 'groups'\?"),
        (
            {
                "groups": {"g": {"weight": 1, "sources": {"a": A}}},
                "schedule": [{"step": 0, "weights": {"a": 1, "g": 1}}],
            },
            r"schedule\.0: a weight for 'a' and for a group it is in; remove one",
        ),
        (
            {
                "groups": {"g": {"weight": 1, "sources": {"a": A}}},
                "schedule": [{"step": 0, "weights": {"g": 1}}],
            },
            "no weight for source",
        ),
    ],
)
def test_a_wrong_group_or_temperature_is_one_clear_line(keys: dict[str, Any], message: str) -> None:
    sources = {**BASE["sources"], "tiny": {"path": "t", "weight": 0.1}}
    with pytest.raises(MixtureError, match=message) as raised:
        Mixture.load({**BASE, "sources": sources, **keys})
    assert "\n" not in str(raised.value)


# Other keys of a source


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rows": {"start": 5, "stop": 5}}, r"sources\.web\.rows: stop: 5 is not after start: 5"),
        ({"rows": {"strat": 5}}, r"unknown key 'sources\.web\.rows\.strat'; did you mean 'start'"),
        ({"max_fraction": 0}, r"sources\.web\.max_fraction"),
        ({"max_failures": -1}, r"sources\.web\.max_failures"),
        ({"max_failures": 0.5}, r"sources\.web\.max_failures: input should be a valid integer"),
        ({"max_failure_fraction": 1}, r"sources\.web\.max_failure_fraction"),
    ],
)
def test_a_wrong_option_of_a_source_is_one_clear_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(MixtureError, match=message):
        Mixture.load({**BASE, "sources": {"web": {"path": "w", "weight": 1, **keys}}})


def test_a_quarantine_file_that_cannot_be_appended_to_is_refused() -> None:
    with pytest.raises(MixtureError, match="quarantine: s3://b/q cannot be appended to"):
        Mixture.load({**BASE, "quarantine": "s3://b/q"})


# Schema


def yaml_of(readme: str) -> list[dict[str, Any]]:
    text = (Path(__file__).parents[2] / readme).read_text()
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


def examples() -> dict[str, Any]:
    [readme], [reference] = yaml_of("README.md"), yaml_of("omniload/README.md")
    group = {
        "weight": "${W}",
        "temperature": 2,
        "sources": {"b": {"path": ["b"], "weight": 1}},
        "groups": {"h": {}},
    }
    return {
        "the README's": readme,
        "the reference's": reference,
        "all that a file may be": {
            "include": ["a.yaml"],
            "seed": "${SEED:-1}",
            "temperature": 3,
            "sources": {
                "gone": None,
                "a": {"path": "a", "transforms": ["m:f", {"call": "m:g", "args": {"x": 1}}]},
            },
            "groups": {"g": group},
        },
    }


def test_the_reference_is_read_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEQ_LEN", raising=False)
    write(tmp_path / "m.yaml", examples()["the reference's"])
    write(tmp_path / "cluster.yaml", {"steps": 9})
    mixture = Mixture.load(tmp_path / "m.yaml", overrides=["sources.code.weight=0.3"])
    assert (mixture.seq_len, mixture.steps) == (8192, 9)
    assert mixture.sources["code"].weight == 0.3
    assert mixture.sources["en"].weight / mixture.sources["de"].weight == pytest.approx((900 / 40) ** 0.5)
    assert sum(mixture.weights_at(5000)) == pytest.approx(1)
    assert mixture.sources["code"].read_columns == ("text", "license")


@pytest.mark.parametrize("name", examples())
def test_the_schema_accepts_what_the_reader_does(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    jsonschema.validate(examples()[name], json_schema())


@pytest.mark.parametrize(
    "values",
    [
        {"seqlen": 3},
        {"seq_len": "x"},
        {"seq_len": 1},
        {"labels": "mine"},
        {"sources": {"a": {"wieght": 1}}},
        {"groups": {"a": {"wieght": 1}}},
        {"groups": {"a": {"groups": {"b": {"sources": 3}}}}},
        {"include": 3},
        {"temperature": 0},
    ],
)
def test_the_schema_refuses_what_the_reader_does(values: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, json_schema())
    with pytest.raises(MixtureError):
        Mixture.load(values)


def test_the_schema_describes_every_key() -> None:
    """So that an editor can say what it completes."""

    def described(schema: dict[str, Any]) -> bool:
        return "description" in schema or any(described(one) for one in schema.get("anyOf", ()))

    schema = json_schema()
    for definition in (schema, *schema["$defs"].values()):
        properties = next(
            d["properties"] for d in (definition, *definition.get("anyOf", ())) if "properties" in d
        )
        for key, value in properties.items():
            assert described(value) or "$ref" in value, key
