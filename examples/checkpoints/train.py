"""One trial that continues where it was lost: a quadratic function, minimised by momentum."""

import json
import os
from functools import partial

import nni_sdk

STEPS = 20


def main():
    parameters = {"lr": 0.05, "momentum": 0.5, **(nni_sdk.get_next_parameter() or {})}
    state = {"step": 0, "x": 5.0, "velocity": 0.0}
    path = nni_sdk.load_checkpoint()
    if path is not None:
        with open(os.path.join(path, "state.json")) as file:
            state = json.load(file)
    while state["step"] < parameters.get("TRIAL_BUDGET", STEPS):
        velocity = parameters["momentum"] * state["velocity"] - parameters["lr"] * 2 * state["x"]
        state = {"step": state["step"] + 1, "x": state["x"] + velocity, "velocity": velocity}
        nni_sdk.report_intermediate_result(-(state["x"] ** 2))
        nni_sdk.save_checkpoint(partial(save, state))
    nni_sdk.report_final_result(-(state["x"] ** 2))


def save(state, folder):
    with open(os.path.join(folder, "state.json"), "w") as file:
        json.dump(state, file)


if __name__ == "__main__":
    main()
