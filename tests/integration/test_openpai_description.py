"""The local OpenPAI is compared with OpenPAI's own description of its REST API, and with OpenPAI's two SDKs.

The JavaScript SDK contains version 2.2.0 of the description. `LATER` has what changed up to version 2.2.7.
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

# The local OpenPAI does not implement these operations of the API and these calls of the SDK. docs/local-openpai.md lists them.
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
# models/v2/utils/frameworkConverter.js. The server sends the runtime's output as an object, and `launcher` as null.
DESCRIBED_OTHERWISE = {"appExitMessages.runtime", "exitDiagnostics.launcher"}

# These parts of the description changed between 2.2.0 and 2.2.7. Source: src/rest-server/docs/swagger.yaml of OpenPAI's
# successor, microsoft/ltp-platform, which has moved PUT of a user to the user's path. Source for the types of machines: the
# routes of microsoft/pai v1.8.1.
TASK = (
    "taskRoles",
    "additionalProperties",
    "properties",
    "taskStatuses",
    "items",
    "properties",
    "taskUid",
    "type",
)
LATER_OPERATIONS = {
    ("/api/v2/alerts", "get"): {"200": {"type": "array"}},
    ("/api/v2/cluster/sku-types", "get"): {"200": {"type": "object"}},
    ("/api/v2/virtual-clusters/{vc}/sku-types", "get"): {"200": {"type": "object"}},
    ("/api/v2/users/{user}", "put"): {"201": {"$ref": "#/components/schemas/Response"}},
}
LATER_TYPES = {
    ("JobDetail", "properties", *TASK): "string",
    ("JobDetail", "properties", "jobStatus", "properties", "appId", "nullable"): True,
    ("JobSummary", "items", "properties", "jobPriority"): {"type": "string", "nullable": True},
}

IN_PATH = {
    "vc": "default", "storage": "team", "group": "default", "user": "ada", "job": "done", "jobAttemptId": "0",
    "attemptIndex": "0", "taskRoleName": "worker", "taskIndex": "0", "taskAttemptId": "0",
}  # fmt: skip
EVE = {"username": "eve", "email": "", "virtualCluster": [], "password": "eve's own", "admin": False}
BODIES = {
    "POST /api/v2/authn/basic/login": {"username": "ada", "password": PASSWORDS["ada"]},
    "POST /api/v2/users": EVE,
    "PUT /api/v2/users": {"data": {"username": "eve", "password": "another one"}, "patch": True},
    "PUT /api/v2/users/{user}": {"data": {"username": "ada", "admin": True}, "patch": True},
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


def the_description():
    """OpenPAI's description 2.2.7 as an OpenAPI document."""
    document = yaml.safe_load(DESCRIPTION.read_text())
    assert document["info"]["version"] == "2.2.0"
    for (path, verb), schemas in LATER_OPERATIONS.items():
        responses = {
            status: {"content": {"application/json": {"schema": schema}}}
            for status, schema in schemas.items()
        }
        document["paths"].setdefault(path, {})[verb] = {"responses": responses}
    for (*path, name), value in LATER_TYPES.items():
        node = document["components"]["schemas"]
        for key in path:
            node = node[key]
        node[name] = value
    return document


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
    document = as_json_schema(the_description())
    operations = {
        f"{verb.upper()} {path}": operation
        for path, verbs in document["paths"].items()
        for verb, operation in verbs.items()
        if verb in ("get", "post", "put", "delete")
    }
    # Call the operation that removes the user last, because the other operations need the user.
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
    # 43 operations are from version 2.2.0, three are newer, and one has the path of OpenPAI's successor.
    assert len(operations) == 47


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


# The requests of openpaisdk 0.4 for Python: method, path, header Content-Type, and body. Source: microsoft/pai,
# contrib/python-sdk/openpaisdk/cluster.py. The SDK sends an empty JSON object where it has no body.
CALLS = {
    "rest_api_cluster_info": ("GET", "v1", None, {}),
    "rest_api_token": ("POST", "v1/token", None, {"username": "ada", "password": PASSWORDS["ada"], "expiration": 3600}),
    "rest_api_user": ("GET", "v1/user/ada", None, {}),
    "rest_api_virtual_clusters": ("GET", "v1/virtual-clusters", "application/json", {}),
    "rest_api_submit": ("POST", "v2/jobs", "text/yaml", SUBMITTED),
    "rest_api_submit of the old format": ("POST", "v1/user/ada/jobs", "application/json", {"jobName": "old", "taskRoles": []}),
    "rest_api_job_list": ("GET", "v1/jobs", None, {}),
    "rest_api_job_list of a user": ("GET", "v1/user/ada/jobs", None, {}),
    "rest_api_job_info": ("GET", "v1/user/ada/jobs/done", None, {}),
    "rest_api_job_info, config": ("GET", "v1/user/ada/jobs/done/config", None, {}),
    "rest_api_job_info, ssh": ("GET", "v1/user/ada/jobs/done/ssh", None, {}),
    "rest_api_execute_job": ("PUT", "v1/user/ada/jobs/made/executionType", None, {"value": "STOP"}),
}  # fmt: skip
# The SDK sends no token with these calls. The server of release 0.14 requires no token for them. The server of release 1.8 and
# the local OpenPAI require one.
WITHOUT_TOKEN = {name for name in CALLS if "job_list" in name or "job_info" in name}


def test_every_call_of_the_python_sdk_succeeds_or_is_documented_as_absent(here):
    ada, guest = here.client(application=False), here.client(None)

    def answer(session, name):
        verb, path, content_type, body = CALLS[name]
        headers = {"Content-Type": content_type} if content_type else {}
        sent = {"data": body} if content_type == "text/yaml" else {"json": body}
        return session.request(
            verb, f"/rest-server/api/{path}", headers=headers, allow_redirects=False, **sent
        )

    statuses = {name: answer(ada, name).status_code for name in CALLS}
    absent = {"rest_api_submit of the old format": 404, "rest_api_job_info, ssh": 404}
    submitted = {"rest_api_submit": 202, "rest_api_execute_job": 202}
    assert statuses == {**dict.fromkeys(CALLS, 200), **absent, **submitted}
    assert answer(ada, "rest_api_submit of the old format").json()["code"] == "NoApiError"
    assert answer(ada, "rest_api_job_info, ssh").json()["code"] == "NoJobSshInfoError"
    assert {answer(guest, name).status_code for name in WITHOUT_TOKEN} == {401}
    assert answer(guest, "rest_api_cluster_info").json()["authnMethod"] == "basic"
    assert "token" in answer(guest, "rest_api_token").json()
    assert answer(ada, "rest_api_user").json()["virtualCluster"] == ["default"]
    default = answer(ada, "rest_api_virtual_clusters").json()["default"]
    assert default["resourcesTotal"].keys() == default["resourcesUsed"].keys() >= {"GPUs", "memory", "vCores"}
    assert answer(ada, "rest_api_job_info").json()["jobStatus"]["state"] == "FAILED"
    names = [each["name"] for each in answer(ada, "rest_api_job_list of a user").json()]
    assert names == ["made", "done"]
