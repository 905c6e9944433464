"""The local OpenPAI is compared with OpenPAI's own description of its REST API, and with OpenPAI's JavaScript SDK. The SDK
contains the description.
"""

import json
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from deadlines import scaled_s
from openpai_here import JOBS, PASSWORDS, an_openpai_here
from openpai_jobs import WORKER, a_job, text_of
from real_experiment import wait_until

SDK = Path(__file__).resolve().parents[2] / "node_modules/@microsoft/openpai-js-sdk"
DESCRIPTION = SDK / "lib/src/api/v2/swagger.yaml"
pytestmark = pytest.mark.skipif(
    not DESCRIPTION.exists(), reason="the package @microsoft/openpai-js-sdk is not installed"
)

# docs/local-openpai.md lists these operations and these calls.
ABSENT = {
    "GET /api/v2/authn/oidc/login",
    "GET /api/v2/authn/oidc/logout",
    "POST /api/v2/groups",
    "PUT /api/v2/groups",
    "DELETE /api/v2/groups/{group}",
    "PUT /api/v2/users/{user}/group/",
    "DELETE /api/v2/users/{user}/group/",
    "PUT /api/v2/users/{user}/grouplist/",
}
ABSENT_CALLS = {
    "authn.oidcLogin",
    "authn.oidcLogout",
    "group.createGroup",
    "group.updateGroup",
    "group.deleteGroup",
    "user.updateUserGroup",
    "user.deleteUserGroup",
    "user.updateUserGrouplist",
}
# The form in which OpenPAI's server sends these fields differs from OpenPAI's description. Source: microsoft/pai v1.8.1,
# models/v2/utils/frameworkConverter.js. The server sends the runtime's output as an object, `launcher` as null, and uids as text.
DESCRIBED_OTHERWISE = {"appExitMessages.runtime", "exitDiagnostics.launcher", "taskUid"}

IN_PATH = {
    "vc": "default", "storage": "team", "group": "default", "user": "ada", "job": "done", "jobAttemptId": "0",
    "attemptIndex": "0", "taskRoleName": "worker", "taskIndex": "0", "taskAttemptId": "0",
}  # fmt: skip
EVE = {"username": "eve", "email": "", "virtualCluster": [], "password": "eve's own", "admin": False}
BODIES = {
    "POST /api/v2/authn/basic/login": {"username": "ada", "password": PASSWORDS["ada"]},
    "POST /api/v2/users": EVE,
    "PUT /api/v2/users": {"data": {"username": "eve", "password": "another one"}, "patch": True},
    "PUT /api/v2/users/me": {"data": {"username": "ada", "oldPassword": PASSWORDS["ada"], "newPassword": PASSWORDS["ada"]}},
    "PUT /api/v2/jobs/{user}~{job}/executionType": {"value": "STOP"},
    "PUT /api/v2/jobs/{user}~{job}/tag": {"value": "mine"},
    "DELETE /api/v2/jobs/{user}~{job}/tag": {"value": "mine"},
}  # fmt: skip
SUBMITTED = text_of(a_job(name="made"))


@pytest.fixture
def here(tmp_path):
    """A local OpenPAI with a finished job of the user ada."""
    with an_openpai_here(tmp_path) as here:
        ada = here.client()
        one_task = ((*WORKER, "instances"), 1), ((*WORKER, "commands"), ["echo hello; exit 3"])
        assert ada.submit(text_of(a_job(*one_task, name="done"))).status_code == 202
        wait_until(
            lambda: ada.get(f"{JOBS}/ada~done").json()["jobStatus"]["state"] == "FAILED", "the job has ended"
        )
        yield here


def as_json_schema(node):
    """A part of an OpenAPI 3.0 document. In the result, `nullable` is converted to JSON Schema."""
    if isinstance(node, list):
        return [as_json_schema(each) for each in node]
    if not isinstance(node, dict):
        return node
    made = {name: as_json_schema(value) for name, value in node.items()}
    if made.get("nullable") is True and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
        if "enum" in made:
            made["enum"].append(None)
    return made


def response_schema(document, operation, status):
    """The JSON schema of a response; None if the description has no JSON schema for it.

    Raises:
        KeyError: the operation has no such status.
    """
    response = operation["responses"][status]
    if "$ref" in response:
        response = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
    schema = response.get("content", {}).get("application/json", {}).get("schema")
    return schema and {**schema, "components": document["components"]}


def answer_of(here, name, path):
    """The response to an operation. An operation that removes a user or a token affects user eve or a new token. All other
    operations use user ada and her job.
    """
    verb = name.partition(" ")[0]
    of_user = {"DELETE /api/v2/users/{user}": "eve", "DELETE /api/v2/tokens/{token}": "ada"}.get(name, "ada")
    session = here.client(application=False)
    at = {**IN_PATH, "user": of_user, "token": here.client(of_user).token if "{token}" in path else ""}
    url = re.sub(r"\{(\w+)\}", lambda match: at[match[1]], path)
    if name == "POST /api/v2/jobs":
        return session.submit(SUBMITTED)
    return session.request(verb, url, **({"json": BODIES[name]} if name in BODIES else {}))


def test_every_operation_of_the_api_description_matches_its_schema_or_is_documented_as_absent(here):
    document = as_json_schema(yaml.safe_load(DESCRIPTION.read_text()))
    operations = {
        f"{verb.upper()} {path}": operation
        for path, verbs in document["paths"].items()
        for verb, operation in verbs.items()
        if verb in ("get", "post", "put", "delete")
    }
    # The operation that removes the user is the last, because the other operations need the user.
    order = sorted(operations, key=lambda name: name in ("DELETE /api/v2/users/{user}",))
    absent, differences = set(), {}
    for name in order:
        answer = answer_of(here, name, name.partition(" ")[2])
        if answer.status_code == 404 and answer.json()["code"] == "NoApiError":
            absent.add(name)
            continue
        assert answer.ok, (name, answer.text)
        schema = response_schema(document, operations[name], str(answer.status_code))
        errors = [] if schema is None else jsonschema.Draft4Validator(schema).iter_errors(answer.json())
        found = [each for each in errors if not each.json_path.endswith(tuple(DESCRIBED_OTHERWISE))]
        if found:
            differences[name] = [f"{each.json_path}: {each.message}" for each in found]
    assert differences == {}
    assert absent == ABSENT
    assert len(operations) == 43


def test_every_call_of_the_javascript_sdk_succeeds_or_is_documented_as_absent(here):
    script = Path(__file__).with_name("openpai_sdk.cjs")
    token = here.client(application=False).token
    ran = subprocess.run(
        ["node", script, here.url, token, "ada", PASSWORDS["ada"]],
        capture_output=True, text=True, check=True, timeout=scaled_s(60),
    )  # fmt: skip
    outcomes = {each["name"]: each for each in map(json.loads, ran.stdout.splitlines())}
    failed = {name: each["error"] for name, each in outcomes.items() if "error" in each}
    assert failed.keys() == ABSENT_CALLS, failed
    assert all("NoApiError" in str(error) for error in failed.values())
    assert len(outcomes) == 43
    result = {name: each.get("result") for name, each in outcomes.items()}
    assert result["job.getJob"]["jobStatus"]["appExitSpec"]["solution"][0] == "read the logs of the task"
    assert result["job.getJobConfig"]["name"] == "done"
    assert [each["attemptIndex"] for each in result["jobHistory.getJobAttempts"]] == [0]
