"""``SagaSQLOperator``, as a DAG file shows it and as Airflow runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowException
from airflow.serialization.serialized_objects import DagSerialization

from airflow_saga import NON_COMPENSABLE, READ_ONLY, SagaDAG, SagaSQLOperator
from airflow_saga.graph import is_step
from tests.capsules.conftest import Shop
from tests.runtime.lab import Lab
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DAG_FILE = """
from __future__ import annotations

from airflow_saga import READ_ONLY, SagaDAG, SagaSQLOperator

with SagaDAG("{dag_id}", schedule=None, params={{"name": "chair"}}, render_template_as_native_obj=True) as dag:
    add = SagaSQLOperator(
        task_id="add",
        conn_id="shop",
        sql="INSERT INTO things (name, price) VALUES (%(name)s, %(price)s) RETURNING id",
        parameters={{"name": "{{{{ params.name }}}}", "price": 5}},
        compensate="DELETE FROM things WHERE id = %(id)s",
    )
    raised = SagaSQLOperator.partial(
        task_id="raise_price",
        conn_id="shop",
        sql="UPDATE things SET price = price + %(by)s",
        compensate="UPDATE things SET price = price - %(by)s",
    ).expand(parameters=[{{"by": 1}}, {{"by": 2}}])
    count = SagaSQLOperator(
        task_id="count", conn_id="shop", sql="SELECT count(*) AS n FROM things", compensate=READ_ONLY
    )
    add >> raised >> count

if __name__ == "__main__":
    run = dag.test()
    print("ENDED", run.run_id, run.state)
"""


def test_the_operator_is_a_step_that_its_compensation_dag_undoes() -> None:
    with SagaDAG("d", schedule=None) as dag:
        made = SagaSQLOperator(task_id="t", conn_id="c", sql="SELECT 1", compensate=READ_ONLY)
    assert is_step(made)
    assert dag.task_ids == ["t"]


@pytest.mark.parametrize(
    "imports", ["airflow_saga.dags", "airflow_saga.decorators.saga", "airflow_saga.operators.sql"]
)
def test_every_process_that_loads_a_saga_knows_how_to_undo_a_statement(imports: str) -> None:
    program = (
        f"import {imports}\n"
        "from airflow_saga.core.actions import registry\n"
        "from airflow_saga.runtime import statements\n"
        "print(registry.find('saga.sql', 1), statements._databases().__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    assert "saga.sql version 1, COMPENSABLE> airflow_saga.capsules.databases" in done.stdout, done.stderr


@pytest.mark.parametrize("compensate", ["", None])
def test_a_statement_that_says_nothing_of_its_undo_is_an_import_error(compensate: Any) -> None:
    with pytest.raises(AirflowException, match="compensate"):
        SagaSQLOperator(task_id="t", conn_id="c", sql="SELECT 1", compensate=compensate)


def test_every_field_is_templated_and_a_word_stays_a_word() -> None:
    with DAG("d", schedule=None):
        made = SagaSQLOperator(
            task_id="t",
            conn_id="{{ c }}",
            sql="{{ s }}",
            parameters={"x": "{{ p }}"},
            compensate="{{ u }}",
        )
        word = SagaSQLOperator(task_id="w", conn_id="c", sql="s", compensate=NON_COMPENSABLE)
    made.render_template_fields({"c": "shop", "s": "SELECT 1", "p": "7", "u": "SELECT 2"})
    assert (made.conn_id, made.sql, made.compensate) == ("shop", "SELECT 1", "SELECT 2")
    assert made.parameters == {"x": "7"}
    word.render_template_fields({})
    assert word.compensate is NON_COMPENSABLE


def test_its_dag_is_stored_alike_each_time_it_is_parsed() -> None:
    def stored() -> str:
        with DAG("d", schedule=None) as dag:
            SagaSQLOperator(task_id="w", conn_id="c", sql="s", compensate=NON_COMPENSABLE)
        return json.dumps(DagSerialization.to_dict(dag), default=str)

    assert " at 0x" not in stored()
    assert stored() == stored()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_airflow_runs_it_and_an_undo_takes_it_back(
    lab: Lab, shop: Shop, shared_database_url: str, tmp_path: Path
) -> None:
    dag_file = tmp_path / "dags" / "things.py"
    dag_file.parent.mkdir()
    dag_file.write_text(DAG_FILE.format(dag_id=lab.dag_id))
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(dag_file.parent),
        "AIRFLOW__API__PORT": str(free_port()),
        "AIRFLOW_CONN_SAGA_DEFAULT": shared_database_url.replace("postgresql://", "postgres://"),
        "PYTHONPATH": str(ROOT),
    }
    airflow = str(Path(sys.executable).with_name("airflow"))
    for command in ([airflow, "db", "migrate"], [sys.executable, str(dag_file)]):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=110, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ended = next(line for line in done.stdout.splitlines() if line.startswith("ENDED"))
    _, run_id, state = ended.rsplit(maxsplit=2)
    assert state.endswith("success"), done.stdout[-6000:]
    assert [(name, int(price)) for _, name, price in shop.things()] == [("chair", 8)]
    assert sorted(lab.states(run_id)) == [("saga.sql", "DONE")] * 3 + [("saga.sql_read", "DONE")]

    lab.undo(run_id)
    assert shop.things() == []
    assert lab.saga_state(run_id) == "CANCELLED"
