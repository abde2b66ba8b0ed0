"""What `airflow saga show` tells: the sentence, what stands and what to do about it, the timeline; masked, in UTC."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.airflow.conftest import Command
from tests.store.scene import Scene


class Show:
    """`show` of a scene."""

    def __init__(self, command: Command) -> None:
        self._command = command

    def text(self, scene: Scene) -> str:
        said = self._command("show", *scene.run)
        assert (said.code, said.err) == (0, "")
        return said.out

    def data(self, scene: Scene) -> dict[str, Any]:
        said = self._command("show", *scene.run, "--output", "json")
        assert said.code == 0, said.err
        data: dict[str, Any] = json.loads(said.out)
        return data

    def story(self, scene: Scene) -> str:
        """The sentence, with its times left out."""
        story: str = self.data(scene)["story"]
        return re.sub(r" at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00", " at T", story).partition(" is ")[2]

    def moves(self, scene: Scene) -> list[str]:
        return [move["command"] or move["what"] for move in self.data(scene)["next"]]


@pytest.fixture
def show(airflow_saga_cli: Command) -> Show:
    return Show(airflow_saga_cli)


# -- the sentence -----------------------------------------------------------------------------------------------------


def test_the_sentence_of_a_running_saga(scene: Scene, show: Show) -> None:
    scene.ran("flight", 1, 2)
    scene.begin(scene.attach("hotel", after=["flight"]))
    assert show.story(scene) == "RUNNING: 2 actions done, 1 under way, at work in hotel."


def test_the_sentence_of_a_completed_saga(scene: Scene, show: Show) -> None:
    scene.ran("flight", 1)
    scene.runs.complete_if_over(*scene.run)
    assert show.story(scene) == "COMPLETED: 1 action done."
    assert show.moves(scene) == []


def test_the_sentence_of_a_saga_that_has_not_begun(scene: Scene, show: Show) -> None:
    scene.runs.open_if_new(*scene.run)
    assert show.story(scene) == "PENDING: no step has begun."


def test_the_sentence_of_a_partly_cancelled_saga(partly: Scene, show: Show) -> None:
    assert show.story(partly) == (
        "PARTIALLY_CANCELLED: asked for by alice at T (wrong dates); 1 undone, 2 still stand, 1 awaited."
    )


def test_the_sentence_of_a_cancelled_saga_counts_what_a_person_accepted(partly: Scene, show: Show) -> None:
    for action in partly.view.residual:
        partly.resolves.resolve(*partly.run, action.action_id, to="ACCEPTED", actor="bob", note_text="fine")
    assert show.story(partly) == (
        "CANCELLED: asked for by alice at T (wrong dates); "
        "1 undone, 3 accepted as they are, nothing else stands."
    )


def test_the_sentence_of_a_cancelled_saga(scene: Scene, show: Show) -> None:
    scene.stopped("flight", 1)
    scene.hint(cause="failure", reason="task hotel failed")
    scene.undone("flight")
    assert show.story(scene) == (
        "CANCELLED: undone since its run failed at T (task hotel failed); 1 undone, nothing stands."
    )


def test_the_sentence_of_a_cancel_before_the_first_step(scene: Scene, show: Show) -> None:
    scene.runs.open_if_new(*scene.run)
    scene.requests.cancel(*scene.run, actor="alice")
    assert show.story(scene) == "CANCELLED: asked for by alice at T; no action had begun."


def test_the_sentence_of_a_saga_that_is_being_undone(scene: Scene, show: Show) -> None:
    scene.stopped("flight", 1)
    scene.cancel(actor="alice")
    assert show.story(scene) == (
        "CANCELLING (to be undone): asked for by alice at T; 0 undone, 1 still stands."
    )


def test_the_sentence_of_a_suspended_saga(scene: Scene, show: Show) -> None:
    scene.stopped("flight", 1)
    scene.requests.cancel(*scene.run, actor="alice", keep=True)
    scene.sweeps.suspend_if_quiet(scene.saga.saga_id)
    assert show.story(scene) == "SUSPENDED: asked for by alice at T; 0 undone, 1 still stands."
    assert show.moves(scene)[-1] == f"airflow saga undo {scene.dag_id} {scene.run_id}"


def test_the_sentence_of_a_due_refund_names_who_asked_first(partly: Scene, show: Show) -> None:
    partly.time_passes(3601)
    assert partly.settles.ask_again_if_due(partly.saga.saga_id) is not None
    assert "asked for by alice at T (wrong dates)" in show.story(partly)


def test_an_action_in_doubt_only_may_stand(scene: Scene, show: Show) -> None:
    step = scene.attach("flight")
    scene.begin(step)
    scene.end(step, 1, "IN_DOUBT", own=True)
    scene.steps.stop_if_held(step)
    scene.ask(actor="alice")
    scene.freeze()
    undo = scene.undo_of()
    assert scene.undos.settle_action_if_held(undo, undo.open_actions[0], "IN_DOUBT", probed=True)
    scene.settle()
    assert show.story(scene).endswith("0 undone, 1 may still stand.")
    assert show.data(scene)["standing"][0]["certain"] is False


# -- what stands, and what to do --------------------------------------------------------------------------------------


def test_each_thing_that_stands_says_why_and_how_to_settle_it(partly: Scene, show: Show) -> None:
    standing = {each["name"]: each for each in show.data(partly)["standing"]}
    assert list(standing) == ["charge_card", "send_mail", "book_hotel"]  # newest first, as it is undone
    assert standing["charge_card"]["why"] == "its compensation gave up after 1 try: HTTP 502"
    assert "NON_COMPENSABLE" in standing["send_mail"]["why"]
    assert re.search(
        r"asked for again at \d{4}-.*\+00:00; waiting for the hotel$", standing["book_hotel"]["why"]
    )
    number = standing["charge_card"]["action"]
    resolve = f"airflow saga resolve {partly.dag_id} {partly.run_id} {number}"
    assert [move["command"] for move in standing["charge_card"]["next"]] == [
        f"airflow saga retry {partly.dag_id} {partly.run_id} {number}",
        f"{resolve} --undone --note 'how you know'",
        f"{resolve} --accepted --note 'how you know'",
    ]
    assert show.moves(partly) == [f"airflow saga undo {partly.dag_id} {partly.run_id}"]


def test_names_in_commands_are_quoted_for_the_shell(store_url: str, show: Show) -> None:
    odd = Scene(store_url, run_id="it's; rm -rf /")
    odd.stopped("flight", 1)
    odd.requests.cancel(*odd.run, actor="alice", keep=True)
    odd.sweeps.suspend_if_quiet(odd.saga.saga_id)
    assert show.moves(odd)[-1] == """airflow saga undo book_trip 'it'"'"'s; rm -rf /'"""
    odd.close()


def test_an_action_in_doubt_of_a_stopped_step_asks_for_an_answer(scene: Scene, show: Show) -> None:
    step = scene.attach("flight", on_failure="keep")
    scene.begin(step)
    scene.end(step, 1, "IN_DOUBT", own=False, error="no answer")
    scene.steps.stop_if_held(step)
    scene.runs.fail_and_hint(*scene.run, cause="failure")
    (standing,) = show.data(scene)["standing"]
    assert standing["why"] == "nobody knows whether it took effect: no answer"
    wait, *answers = standing["next"]
    assert wait["what"].startswith("wait until")
    assert ["--happened" in answers[0]["command"], "--did-not-happen" in answers[1]["command"]] == [
        True,
        True,
    ]


def test_a_held_undo_asks_to_be_released(scene: Scene, show: Show) -> None:
    scene.stopped("flight", 1)
    scene.hint(cause="lost_worker")
    scene.sweeps.hold_if_mass_outage(causes=["lost_worker"], threshold=0, window_seconds=60)
    why, release = show.moves(scene)
    assert "held since many sagas failed at once" in why
    assert release == f"airflow saga release {scene.dag_id} {scene.run_id}"


def test_a_step_that_is_still_at_work_is_named_with_the_way_to_abandon_its_call(
    scene: Scene, show: Show
) -> None:
    scene.begin(scene.attach("flight"))
    scene.cancel()
    (move,) = show.data(scene)["next"]
    assert "flight may let its call end first" in move["what"]
    assert move["command"] == f"airflow saga cancel {scene.dag_id} {scene.run_id} --now"


def test_an_undo_that_nobody_carries_out_says_what_to_look_at(scene: Scene, show: Show) -> None:
    scene.stopped("flight", 1)
    scene.cancel()
    assert show.moves(scene) == []  # it was asked for a moment ago
    scene.time_passes(400)
    assert show.moves(scene) == [
        "airflow dags unpause book_trip__compensation",
        "airflow saga doctor",
        "airflow saga reconcile",
    ]


def test_an_undo_under_way_names_its_run(scene: Scene, show: Show) -> None:
    scene.stopped("flight", 1)
    scene.cancel()
    scene.freeze()
    assert show.moves(scene) == ["nothing: book_trip__compensation / undo__1 undoes it"]


def test_a_failed_run_whose_effects_are_kept_says_so(scene: Scene, show: Show) -> None:
    scene.stopped("flight", 1, on_failure="keep")
    scene.runs.fail_and_hint(*scene.run, cause="failure")
    assert show.moves(scene)[-1] == f"airflow saga undo {scene.dag_id} {scene.run_id}"
    assert "since on_failure is 'keep'" in show.data(scene)["next"][0]["what"]


# -- the timeline -----------------------------------------------------------------------------------------------------


def test_the_timeline_is_in_the_order_of_time_and_the_undo_in_reverse(partly: Scene, show: Show) -> None:
    entries = show.data(partly)["timeline"]
    assert [entry["at"] for entry in entries] == sorted(entry["at"] for entry in entries)
    done = [entry["what"] for entry in entries if entry["kind"] in ("action", "read")]
    undone = [entry["what"] for entry in entries if entry["kind"] == "undo"]
    assert done == ["search", "book_flight", "book_hotel", "send_mail", "charge_card"]
    assert undone == ["undo charge_card", "undo send_mail", "undo book_hotel", "undo book_flight"]
    what = [entry["what"] for entry in entries]
    assert what.index("charge_card") < what.index("undo asked for") < what.index("undo charge_card")


def test_an_entry_says_who_what_state_key_tries_and_how_long(partly: Scene, show: Show) -> None:
    entries = show.data(partly)["timeline"]
    booked = next(entry for entry in entries if entry["what"] == "book_flight")
    assert (booked["state"], booked["step"], booked["tries"]) == ("DONE", "flight", 1)
    assert booked["key"] == partly.action(2).key
    assert booked["seconds"] >= 0
    assert booked["result"] == "r2"
    asked = next(entry for entry in entries if entry["what"] == "undo asked for")
    assert asked["who"] == "alice"
    assert "wrong dates" in asked["detail"]
    failed = next(entry for entry in entries if entry["what"] == "undo charge_card")
    assert (failed["state"], failed["error"], failed["tries"]) == ("COMPENSATION_FAILED", "HTTP 502", 1)
    assert failed["key"] == partly.action(1, "pay").undo_key


def test_a_late_answer_is_in_the_timeline(scene: Scene, show: Show) -> None:
    step = scene.attach("flight")
    scene.begin(step)
    scene.cancel()
    scene.time_passes(30)
    scene.freeze()
    undo = scene.undo_of()
    scene.compensate(undo, undo.open_actions[0])
    scene.settle()
    from airflow_saga.core.records import Outcome

    scene.lates.record_late(step, Outcome(1, "DONE", result='"F1"'), idempotent=False)
    late = [entry for entry in show.data(scene)["timeline"] if entry["kind"] == "late"]
    assert [entry["what"] for entry in late] == ["late answer"]
    assert "took effect after all" in late[0]["detail"]


def test_a_resolution_is_in_the_timeline_with_its_note(partly: Scene, show: Show) -> None:
    number = partly.action(1, "pay").action_id
    partly.resolves.resolve(*partly.run, number, to="COMPENSATED", actor="bob", note_text="called the bank")
    resolved = [entry for entry in show.data(partly)["timeline"] if entry["kind"] == "person"]
    assert [(entry["who"], entry["action"]) for entry in resolved] == [("bob", number)]
    assert "called the bank" in resolved[0]["detail"]


# -- how it is shown --------------------------------------------------------------------------------------------------


def test_the_text_begins_with_the_sentence_and_has_every_part(partly: Scene, show: Show) -> None:
    text = show.text(partly)
    assert text.startswith(
        f"{partly.dag_id} / {partly.run_id} is PARTIALLY_CANCELLED: asked for by alice at "
    )
    parts = ["What to do", "What stands: 2 for sure, 1 perhaps", "Timeline", "Steps", "Undo requests"]
    at = [text.index(f"\n{part}\n") for part in parts]
    assert at == sorted(at)
    assert re.search(r"\n  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\+00:00  action   #\d+ book_flight", text)


def test_values_under_sensitive_names_are_masked(partly: Scene, show: Show) -> None:
    text = show.text(partly) + json.dumps(show.data(partly))
    assert "tok_4242" not in text
    assert '"token": "***"' in text


def test_known_secrets_and_control_characters_are_not_shown(scene: Scene, show: Show) -> None:
    from airflow.sdk.log import mask_secret

    mask_secret("opensesame-9000")
    step = scene.attach("flight")
    scene.begin(step, 1, params=json.dumps({"note": "\x1b[2Jopensesame-9000"}))
    scene.end(step, 1, "FAILED", error="said opensesame-9000 \x1b]0;title\x07")
    text = show.text(scene)
    assert "opensesame" not in text
    assert "\x1b" not in text
    assert "said ***" in text


def test_a_value_that_cannot_be_read_hides_nothing_else(scene: Scene, show: Show) -> None:
    scene.act(scene.attach("flight"), 1, params="{damaged")
    booked = next(entry for entry in show.data(scene)["timeline"] if entry["kind"] == "action")
    assert booked["params"].startswith("<a stored value is damaged")
    assert booked["result"] == "r1"


def test_the_data_keeps_its_keys_and_types(partly: Scene, show: Show, airflow_saga_cli: Command) -> None:
    data = show.data(partly)
    assert list(data) == ["story", "saga", "standing", "next", "timeline", "steps", "actions", "requests"]
    action = data["actions"][1]
    assert (action["name"], action["seq"], action["residual"]) == ("book_flight", 2, False)
    assert (action["state"], action["forward_state"]) == ("COMPENSATED", "DONE")
    assert action["begun_at"].endswith("+00:00")
    (request,) = data["requests"]
    assert (request["state"], request["whole_run"], request["number"]) == ("SETTLED", True, 1)
    said = yaml.safe_load(airflow_saga_cli("show", *partly.run, "--output", "yaml").out)
    for told in (data, said):
        del told["timeline"]  # it says for how long the refund is awaited, which has grown meanwhile
    assert said == data


def test_a_saga_that_is_not_there_is_refused(scene: Scene, airflow_saga_cli: Command) -> None:
    said = airflow_saga_cli("show", *scene.run)
    assert (said.code, said.out) == (1, "")
    assert "airflow saga list" in said.err
