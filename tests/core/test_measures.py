"""The names of what is measured: documented in the README, drawn by the dashboard, and no others in either."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from airflow_saga.core import measures
from airflow_saga.core.measures import MEASURES, Kind, Measure
from tests.core.figures import README, with_table

DASHBOARD = Path(__file__).parents[2] / "docker" / "grafana" / "airflow-saga.json"
PROMETHEUS = {f"airflow_{each.name.replace('.', '_')}": each for each in MEASURES}
# What statsd_exporter and OTLP append to a name, by its kind.
ENDINGS = {
    Kind.COUNTER: {"", "(_total)?"},
    Kind.TIMING: {"", "_bucket", "_milliseconds"},
    Kind.GAUGE: {""},
}
_NAME = re.compile(r"\bairflow_[a-z_]+(?:\(_total\)\?)?")
_LABEL = re.compile(r"[{,]\s*(\w+)\s*=|by \((\w+)\)|label_values\(.*, (\w+)\)")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return loaded


def expressions(dashboard: dict[str, Any]) -> list[str]:
    drawn = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = [each["definition"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    return drawn + asked


def measured_in(expression: str) -> list[Measure]:
    """What an expression reads.

    :raises AssertionError: a name in it is not documented, or not of that kind.
    """
    found = []
    for name in _NAME.findall(expression):
        known = [each for each in PROMETHEUS if name.startswith(each)]
        assert known, f"{name} is not documented"
        longest = max(known, key=len)
        measure = PROMETHEUS[longest]
        assert name[len(longest) :] in ENDINGS[measure.kind], f"{name}: no name of a {measure.kind}"
        found.append(measure)
    return found


def test_every_measure_of_the_module_is_in_its_table_once() -> None:
    named = [value for value in vars(measures).values() if isinstance(value, Measure)]
    assert sorted(each.name for each in named) == sorted(each.name for each in MEASURES)
    assert len({each.name for each in MEASURES}) == len(MEASURES)


def test_a_name_is_one_that_airflow_lets_through_and_its_tags_are_bounded() -> None:
    for each in MEASURES:
        assert re.fullmatch(r"saga(\.[a-z_]+){2}", each.name)
        assert set(each.tags) <= {"dag_id", "effect", "cause"}


def test_the_readme_has_the_table_as_it_is() -> None:
    text = README.read_text(encoding="utf-8")
    assert "<!-- metrics -->" in text
    assert text == with_table(text), "README.md is behind the table: run python -m tests.core.figures"


def test_the_dashboard_reads_documented_names_only_under_their_own_tags(dashboard: dict[str, Any]) -> None:
    for expression in expressions(dashboard):
        read = measured_in(expression)
        assert read, f"{expression} reads nothing of ours"
        labels = {next(filter(None, found)) for found in _LABEL.findall(expression)}
        tags = set.intersection(*(set(each.tags) for each in read))
        assert labels <= tags | {"le", "quantile", "__name__"}, expression


def test_the_dashboard_draws_every_measure(dashboard: dict[str, Any]) -> None:
    read = {each.name for expression in expressions(dashboard) for each in measured_in(expression)}
    assert read == {each.name for each in MEASURES}


@pytest.mark.parametrize("wrong", ["airflow_saga_action_began", "airflow_saga_open_residuals_bucket"])
def test_a_name_that_is_not_documented_is_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        measured_in(f"sum(rate({wrong}[5m]))")


def test_the_dashboard_can_be_imported_wherever_there_is_a_prometheus(dashboard: dict[str, Any]) -> None:
    assert dashboard["uid"]
    assert dashboard["title"]
    assert dashboard["schemaVersion"] >= 36
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    drawn = [panel for panel in panels if panel["type"] != "row"]
    for source in (each["datasource"] for panel in drawn for each in [panel, *panel["targets"]]):
        assert source == {"type": "prometheus", "uid": "${datasource}"}
    used = set(re.findall(r"\$\{?(\w+)", " ".join(expressions(dashboard))))
    assert used <= set(variables)


def test_no_two_panels_of_the_dashboard_lie_on_each_other(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
