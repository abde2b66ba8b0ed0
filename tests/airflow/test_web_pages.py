"""The pages as they are sent: what stands first, what is offered to whom, and that no text becomes markup."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser

from airflow_saga.core.identity import undo_run_id
from airflow_saga.store.rewind import RewindVerbs
from tests.airflow.web import Web, of
from tests.store.scene import Scene

AirflowRun = Callable[..., None]
EVIL = "<script>parent.stolen=1</script><img src=x onerror=parent.stolen=1>\"'"


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def verbs(self) -> list[str]:
        return [attrs["data-verb"] or "" for tag, attrs in self.tags if tag == "button"]


def page(web: Web, path: str, role: str = "user") -> Tags:
    answer = web.get(path, role)
    assert answer.status_code == 200, answer.text
    return Tags(answer.text)


def words(tags: Tags) -> str:
    return " ".join(tags.text.split())


def test_what_still_stands_comes_before_the_picture_and_the_table(web: Web, partly: Scene) -> None:
    text = words(page(web, of(partly.run)))
    order = [
        "Partly cancelled",
        "Asked for by alice",
        "What still stands",
        "charge_card",
        "Timeline",
        "Actions (",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "its compensation gave up after 1 try: HTTP 502" in text


def test_verbs_are_offered_where_the_state_allows_them(
    web: Web, scene: Scene, airflow_run: AirflowRun
) -> None:
    airflow_run(*scene.run)
    scene.act(scene.attach(), 1)
    assert page(web, of(scene.run)).verbs() == ["cancel", "cancel"]
    scene.cancel()
    assert page(web, of(scene.run)).verbs() == ["cancel"], "stop now, while a step is at work"


def test_a_finished_saga_can_be_undone_and_a_cancelled_one_has_no_verbs(web: Web, scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.runs.complete_if_over(*scene.run)
    assert page(web, of(scene.run)).verbs() == ["undo", "undo"], "the whole run, and from its action on"
    scene.ask()
    scene.undone("flight")
    scene.settle()
    assert scene.saga.state == "CANCELLED"
    assert page(web, of(scene.run)).verbs() == []


def test_each_effect_that_stands_can_be_settled_where_it_is_named(web: Web, partly: Scene) -> None:
    charge = partly.action(1, "pay").action_id
    verbs = page(web, of(partly.run)).verbs()
    assert verbs[0] == "undo"
    assert verbs.count(f"actions/{charge}/resolve") == 2
    assert [verb for verb in verbs if verb.endswith("/retry")] == [
        f"actions/{charge}/retry",
        f"actions/{partly.action(1, 'hotel').action_id}/retry",
    ], "what is declared NON_COMPENSABLE cannot be tried again"


def test_a_viewer_is_offered_nothing(web: Web, partly: Scene) -> None:
    assert page(web, of(partly.run), role="viewer").verbs() == []


def test_while_it_stops_it_says_what_it_waits_for(web: Web, scene: Scene) -> None:
    scene.begin(scene.attach("pay"), name="charge_card", timeout_seconds=10.0)
    scene.cancel()
    text = words(page(web, of(scene.run)))
    assert "Stopping" in text
    assert re.search(r"Waiting for charge_card of pay, \d s so far, 1[01] s more at most\.", text), text


def test_c88_while_it_stops_a_call_that_did_not_report_is_waited_for_by_name(web: Web, scene: Scene) -> None:
    step = scene.attach("pay")
    scene.begin(step, name="charge_card", timeout_seconds=10.0)
    scene.end(step, 1, state="IN_DOUBT", own=False)
    scene.cancel()
    text = words(page(web, of(scene.run)))
    waits = r"Waiting for charge_card of pay, which did not report and may take effect for (\d+) s more\."
    found = re.search(waits, text)
    assert found, text
    assert 5 <= int(found[1]) <= 11


def test_c97_while_it_stops_a_body_that_calls_nothing_is_named_too(web: Web, scene: Scene) -> None:
    """Else nothing at all would be said while a body hangs, and "Stopping" would look like a tab that hangs itself."""
    scene.act(scene.attach("pay"), name="charge_card")
    scene.cancel()
    text = words(page(web, of(scene.run)))
    assert "Waiting for the end of pay, which has no call under way." in text
    assert scene.steps.stop_if_held(scene.step("pay"))
    assert "Waiting for" not in words(page(web, of(scene.run)))


def test_what_others_wrote_is_text_everywhere(web: Web, scene: Scene, airflow_run: AirflowRun) -> None:
    airflow_run(*scene.run)
    step = scene.attach(f"task{EVIL}")
    scene.begin(step, 1, name="ask_model", params=json.dumps({"prompt": EVIL}))
    scene.end(step, 1, result=json.dumps(EVIL))
    scene.begin(step, 2, name="book")
    scene.end(step, 2, state="IN_DOUBT", error=EVIL)
    assert scene.steps.stop_if_held(step)
    scene.cancel(actor=EVIL, reason=EVIL)
    for path in (of(scene.run), "/", of(scene.run) + "?task_id=" + "%3Cscript%3Ealert(1)%3C/script%3E"):
        answer = web.get(path, "user")
        tags = Tags(answer.text)
        assert [attrs for tag, attrs in tags.tags if tag == "script"] == [
            {"src": "/saga/static/saga.js", "defer": None}
        ]
        assert not [tag for tag, _ in tags.tags if tag in ("img", "iframe", "style", "object")]
        assert not [name for _, attrs in tags.tags for name in attrs if name.startswith("on")]
        assert "<script>parent" not in answer.text
    assert "<script>parent.stolen=1</script>" in page(web, of(scene.run)).text


def test_a_run_without_a_saga_is_told_so_kindly(web: Web) -> None:
    assert "No saga in this run" in page(web, of(("book_trip", "nobody"))).text
    assert "undoes another one" in page(web, of(("book_trip__compensation", "undo__1"))).text
    assert "asks about another one" in page(web, of(("book_trip__compensation", "probe__1"))).text


def test_the_page_of_an_undo_leads_to_the_run_that_it_undoes(web: Web, partly: Scene) -> None:
    undo = ("book_trip__compensation", undo_run_id(partly.request.request_uuid))
    links = [attrs for tag, attrs in page(web, of(undo)).tags if tag == "a"]
    assert [link["href"] for link in links] == [f"/saga{of(partly.run)}"]


def test_a_step_shows_only_its_own_actions(web: Web, partly: Scene) -> None:
    text = words(page(web, f"{of(partly.run)}?task_id=pay&map_index={{MAP_INDEX}}"))
    assert "· step pay" in text
    assert "Actions (1)" in text


def test_a_task_of_a_saga_dag_links_to_its_step_while_it_runs(
    web: Web, scene: Scene, airflow_run: AirflowRun
) -> None:
    run = f"/dags/tagged/runs/{scene.run_id}"
    airflow_run("tagged", scene.run_id)
    airflow_run("no_saga", scene.run_id)
    links = web.airflow(f"/dags/tagged/dagRuns/{scene.run_id}/taskInstances/flight/links").json()
    assert links["extra_links"] == {"Saga": f"{run}/tasks/flight/plugin/saga-step"}
    others = web.airflow(f"/dags/no_saga/dagRuns/{scene.run_id}/taskInstances/flight/links").json()
    assert others["extra_links"] == {"Saga": None}


def test_the_list_puts_first_what_needs_a_person(web: Web, partly: Scene) -> None:
    other = partly.another_run(f"{partly.run_id}_other")
    other.ran("flight", 1)
    text = words(page(web, "/"))
    assert text.index("1 needs a person") < text.index(partly.run_id) < text.index("The others")
    assert text.index("The others") < text.index(other.run_id)
    assert "Sagas of book_trip" in page(web, "/dags/book_trip").text
    other.close()


def test_undo_from_is_offered_at_what_stands_of_a_saga_at_rest(web: Web, scene: Scene) -> None:
    step = scene.act(scene.attach(), 1, 3)
    scene.read(step, 2)
    before = page(web, of(scene.run))
    assert not [attrs for _, attrs in before.tags if (attrs.get("id") or "").startswith("from-")]
    scene.finish(step)
    scene.runs.complete_if_over(*scene.run)
    offered = [attrs["id"] for _, attrs in page(web, of(scene.run)).tags if "data-plan" in attrs]
    assert offered[1:] == [f"from-{scene.action(seq).action_id}" for seq in (1, 3)]


def test_what_came_before_an_undo_from_is_told_as_kept(web: Web, scene: Scene) -> None:
    scene.ran("flight", 1, 2, 3)
    scene.runs.complete_if_over(*scene.run)
    RewindVerbs(scene.connection).undo_from(*scene.run, scene.action(2).action_id, actor="ann")
    scene.undone("flight")
    text = words(page(web, of(scene.run)))
    assert "Asked for by ann" in text
    assert "from book of flight on" in text
    assert "2 undone, 1 kept, from before that" in text
    assert "What still stands" not in text


def test_a_call_that_takes_longer_than_it_may_is_said_to_be_stuck(web: Web, scene: Scene) -> None:
    scene.begin(scene.attach("pay"), name="charge_card", timeout_seconds=10.0)
    scene.cancel()
    scene.sql("UPDATE airflow_saga.action SET lands_by = clock_timestamp() - interval '1 second'")
    shown = page(web, of(scene.run))
    assert "longer than it may: it is stuck, and Stop now abandons it" in words(shown)
    assert shown.verbs() == ["cancel"]


def test_the_list_is_paged(web: Web, scene: Scene) -> None:
    for number in range(101):
        other = scene.another_run(f"{scene.run_id}_{number:03}")
        other.runs.open_if_new(*other.run)
        other.close()
    first, second = (page(web, f"/dags/book_trip?page={number}") for number in (1, 2))
    assert f"{scene.run_id}_100" in first.text
    assert f"{scene.run_id}_000" in second.text
    assert ("older" in first.text, "newer" in first.text) == (True, False)
    assert ("older" in second.text, "newer" in second.text) == (False, True)
    assert "None yet" not in page(web, "/dags/book_trip?page=3").text


def test_ten_thousand_actions_are_paged_and_there_within_a_second(web: Web, scene: Scene) -> None:
    step = scene.attach()
    for start in range(0, 10_000, 500):
        seqs = range(start + 1, start + 501)
        intents = [scene.intent(step, seq, params='{"trip": {"to": "LIS"}}') for seq in seqs]
        scene.write(step, begin=intents)
        scene.write(step, ended=[scene_outcome(seq) for seq in seqs])
    web.get(of(scene.run))
    took = []
    for _ in range(3):
        began = time.monotonic()
        answer = web.get(f"{of(scene.run)}?page=3")
        took.append(time.monotonic() - began)
    assert answer.text.count('<tr id="action-') == 100
    assert "201 to 300 of 10000" in words(Tags(answer.text))
    assert len(answer.content) < 400_000
    assert min(took) < 1.0, took


def scene_outcome(seq: int):  # type: ignore[no-untyped-def]
    from airflow_saga.core.records import Outcome

    return Outcome(seq, "DONE", '{"id": "b-1"}')
