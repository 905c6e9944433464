"""One trial: a small neural network that learns to read scikit-learn's handwritten digits."""

import os

# Several trials share this machine. Left alone, each would start a thread per core in the linear-algebra
# library, and they would slow each other down. It reads these when it is imported, so set them now.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

from sklearn.datasets import load_digits  # noqa: E402
from sklearn.model_selection import train_test_split  # noqa: E402
from sklearn.neural_network import MLPClassifier  # noqa: E402

import nni_sdk  # noqa: E402

EPOCHS = 12
# The same for every trial, so that two trials differ in their parameters only.
SEED = 20

# What `python train.py` uses outside an experiment.
DEFAULTS = {
    "learning_rate": 0.001,
    "hidden_width": 64,
    "alpha": 0.0001,
    "batch_size": 64,
    "activation": "relu",
    "optimiser": {"_name": "adam", "beta_1": 0.9},
}


def main() -> None:
    parameters = {**DEFAULTS, **(nni_sdk.get_next_parameter() or {})}
    pixels, digits = load_digits(return_X_y=True)
    train_x, valid_x, train_y, valid_y = train_test_split(
        pixels / 16.0, digits, test_size=0.25, stratify=digits, random_state=SEED
    )
    # The optimiser's own parameters are named as scikit-learn names them.
    optimiser = dict(parameters["optimiser"])
    model = MLPClassifier(
        solver=optimiser.pop("_name"),
        **optimiser,
        # quniform gives whole numbers as floats.
        hidden_layer_sizes=(int(parameters["hidden_width"]),),
        learning_rate_init=parameters["learning_rate"],
        alpha=parameters["alpha"],
        batch_size=parameters["batch_size"],
        activation=parameters["activation"],
        random_state=SEED,
    )
    accuracy = 0.0
    for epoch in range(EPOCHS):
        model.partial_fit(train_x, train_y, classes=range(10))
        accuracy = model.score(valid_x, valid_y)
        nni_sdk.report_intermediate_result(accuracy)
        print(f"epoch {epoch + 1}: loss {model.loss_:.4f}, validation accuracy {accuracy:.4f}")
    nni_sdk.report_final_result(accuracy)


if __name__ == "__main__":
    main()
