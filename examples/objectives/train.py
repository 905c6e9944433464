"""A decision forest on scikit-learn's digits that has to be accurate, fast and small at the same time."""

import pickle
import time

from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split

import nni_sdk


def main() -> None:
    parameters = {"trees": 50, "depth": 8} | nni_sdk.get_next_parameter()
    images, digits = load_digits(return_X_y=True)
    train, test, train_digits, test_digits = train_test_split(images, digits, test_size=0.25, random_state=0)
    forest = RandomForestClassifier(parameters["trees"], max_depth=parameters["depth"], random_state=0)
    forest.fit(train, train_digits)
    began_s = time.process_time()
    accuracy = forest.score(test, test_digits)
    nni_sdk.report_final_result(
        {
            "accuracy": accuracy,
            "latency_ms": (time.process_time() - began_s) * 1000,
            "size_mb": len(pickle.dumps(forest)) / 1e6,
        }
    )


if __name__ == "__main__":
    main()
