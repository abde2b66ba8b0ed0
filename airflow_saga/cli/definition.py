"""Which commands there are. Airflow asks at every ``airflow …``, so nothing here is imported but its own parser parts.

One verb here is one verb of the API and one button of the tab, by the same name.
"""

from __future__ import annotations

from airflow.cli.cli_config import (
    ARG_VERBOSE,
    ActionCommand,
    Arg,
    CLICommand,
    GroupCommand,
    lazy_load_command,
    positive_int,
)

from airflow_saga.core.states import SagaState

_COMMANDS = "airflow_saga.cli.commands"
_UPKEEP = "airflow_saga.cli.upkeep"

ARG_DAG_ID = Arg(("dag_id",), help="The id of the saga DAG, not of its compensation DAG")
ARG_RUN_ID = Arg(("run_id",), help="The id of the DAG run")
ARG_ACTION = Arg(
    ("action",), type=positive_int(allow_zero=False), help="The number that `show` gives the action"
)
ARG_OUTPUT = Arg(
    ("-o", "--output"),
    help="For people (table), or for programs: json, yaml (default: table)",
    choices=("table", "json", "yaml"),
    default="table",
)
ARG_REASON = Arg(("--reason",), help="Why, for those who read the timeline later")
ARG_NOW = Arg(
    ("--now",),
    help="Abandon the call under way, which is in doubt then, instead of letting it end",
    action="store_true",
)
ARG_KEEP = Arg(
    ("--keep",), help="Only stop: keep the effects, to be resumed or undone later", action="store_true"
)
ARG_PLAN = Arg(
    ("--plan",),
    metavar="HASH",
    help="Undo exactly what `plan` showed, or refuse if something has moved since",
)
ARG_FROM = Arg(
    ("--from",),
    dest="from_action",
    metavar="ACTION",
    type=positive_int(allow_zero=False),
    help="Only this action and all that came after it, by the number that `show` gives it",
)
ARG_TO = Arg(
    ("--to",),
    metavar="NAME",
    required=True,
    help="The save-point, as saga.savepoint(name) made it; TASK:NAME where several steps have one of that name",
)
ARG_UNDONE = Arg(("--undone",), help="Its effect is undone, by hand", action="store_true")
ARG_ACCEPTED = Arg(("--accepted",), help="Its effect stands, and may stay", action="store_true")
# False: not given; None: given without a result. Airflow's Arg knows no `const`.
ARG_HAPPENED = Arg(
    ("--happened",),
    metavar="JSON",
    nargs="?",
    default=False,
    help="An action in doubt did take effect; its result, as JSON, for the step that goes on and for the undo",
)
ARG_DID_NOT_HAPPEN = Arg(
    ("--did-not-happen",), help="An action in doubt did not take effect", action="store_true"
)
ARG_NOTE = Arg(("--note",), help="How you know, for those who read the timeline later", required=True)
ARG_LIST_DAG_ID = Arg(("-d", "--dag-id"), help="Only the sagas of this DAG")
ARG_LIST_STATE = Arg(
    ("-s", "--state"),
    help="Only sagas in this state; may be given several times",
    choices=tuple(SagaState),
    action="append",
)
ARG_LIMIT = Arg(
    ("--limit",),
    type=positive_int(allow_zero=False),
    default=50,
    help="How many sagas at most (default: 50)",
)
ARG_RETENTION_DAYS = Arg(
    ("--retention-days",),
    type=positive_int(allow_zero=False),
    help="Instead of [saga] retention_days",
)
ARG_YES = Arg(("-y", "--yes"), help="Do not ask", action="store_true")
ARG_RECEIPTS = Arg(
    ("--receipts",),
    help="Make the table of receipts in a database of yours, for saga.sql and the capsules that write rows",
    action="store_true",
)
ARG_CONN_ID = Arg(("--conn-id",), metavar="CONN", help="With --receipts: the connection to that database")

_SAGA = (ARG_DAG_ID, ARG_RUN_ID)
_EVERY = (ARG_OUTPUT, ARG_VERBOSE)


def _command(
    name: str, help_text: str, *args: Arg, function: str | None = None, description: str | None = None
) -> ActionCommand:
    loaded = lazy_load_command(function or f"{_COMMANDS}.{name}")
    return ActionCommand(name, help_text, loaded, (*args, *_EVERY), description=description)


def _db_command(name: str, help_text: str, *args: Arg) -> ActionCommand:
    return ActionCommand(name, help_text, lazy_load_command(f"{_UPKEEP}.db_{name}"), (*args, *_EVERY))


_DB_COMMANDS = (
    _db_command(
        "migrate",
        "Make the tables of the saga store, or bring them to this version",
        ARG_RECEIPTS,
        ARG_CONN_ID,
    ),
    _db_command("check", "Say whether the tables of the saga store fit this version"),
)
_SAGA_COMMANDS = (
    GroupCommand("db", "The tables of the saga store", _DB_COMMANDS),
    _command(
        "list",
        "List sagas, those that need a person first",
        ARG_LIST_DAG_ID,
        ARG_LIST_STATE,
        ARG_LIMIT,
        function=f"{_COMMANDS}.list_sagas",
    ),
    _command("show", "Tell a saga: what stands, what to do next, what happened when", *_SAGA),
    _command("plan", "Show what an undo would do now, in its order, without doing it", *_SAGA, ARG_FROM),
    _command(
        "cancel",
        "Stop a running saga, then undo it (or keep its effects)",
        *_SAGA,
        ARG_KEEP,
        ARG_NOW,
        ARG_REASON,
        description="Stop a running saga: the call under way may end, then all is undone (--keep: nothing is).",
    ),
    _command(
        "undo",
        "Undo a saga, whatever state it is in",
        *_SAGA,
        ARG_FROM,
        ARG_PLAN,
        ARG_NOW,
        ARG_REASON,
        description=(
            "Undo a saga, whatever state it is in. With --from, of a saga that is at rest: only this action and all "
            "that came after it, in its step and in later ones; the rest stays, and the run can be cleared to go on."
        ),
    ),
    _command(
        "retry",
        "Try the undo of one action again, where it has failed",
        *_SAGA,
        ARG_ACTION,
        ARG_REASON,
        description="Try the undo of one action again that an undo has left standing; no other is tried again.",
    ),
    _command(
        "rewind",
        "Go back to a save-point: undo what came after it, and run on from there",
        *_SAGA,
        ARG_TO,
        ARG_REASON,
        description=(
            "Undo everything that came after a save-point, in this step and in those after it, newest first; clear the "
            "tasks concerned; the run goes on from there. `show` lists the save-points."
        ),
    ),
    _command(
        "resolve",
        "Say what became of an action, where the product cannot know",
        *_SAGA,
        ARG_ACTION,
        ARG_UNDONE,
        ARG_ACCEPTED,
        ARG_HAPPENED,
        ARG_DID_NOT_HAPPEN,
        ARG_NOTE,
        description=(
            "Say what became of an action: --undone or --accepted after an undo; --happened or --did-not-happen for "
            "an action in doubt of a stopped step."
        ),
    ),
    _command(
        "probe",
        "Ask the verify probes about what is in doubt; `plan` shows what they say",
        *_SAGA,
        description=(
            "Ask the verify probes about what is in doubt, so that you know more before you decide. A run of the "
            "compensation DAG does it, since they are in the DAG's file; nothing else is called, nothing is decided."
        ),
    ),
    _command("release", "Let an undo go on that is held since many sagas failed at once", *_SAGA),
    _command(
        "reconcile",
        "Look once for what every hook has missed, as the reconciler DAG does",
        function=f"{_UPKEEP}.reconcile",
    ),
    _command(
        "prune",
        "Delete the actions of settled sagas that are old",
        ARG_RETENTION_DAYS,
        ARG_YES,
        function=f"{_UPKEEP}.prune",
    ),
    _command(
        "doctor",
        "Prove that store, plugin and reconciler are alive; say what to do where not",
        function=f"{_UPKEEP}.doctor",
    ),
)


def get_saga_cli_commands() -> list[CLICommand]:
    """What provider info's ``cli`` names."""
    return [GroupCommand("saga", "Cancel and undo DAG runs", _SAGA_COMMANDS)]
