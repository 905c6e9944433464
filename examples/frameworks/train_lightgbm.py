"""One trial: boosted trees of LightGBM on scikit-learn's breast cancer data, ended by `early_stopping`."""

import lightgbm
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import nni_sdk.integrations.lightgbm

parameters = {"learning_rate": 0.1, **(nni_sdk.get_next_parameter() or {})}
train_x, valid_x, train_y, valid_y = train_test_split(*load_breast_cancer(return_X_y=True), random_state=20)
train = lightgbm.Dataset(train_x, train_y)
model = lightgbm.train(
    {"objective": "binary", "metric": "auc", "num_threads": 1, "verbose": -1, **parameters},
    train,
    num_boost_round=50,
    valid_sets=[lightgbm.Dataset(valid_x, valid_y, reference=train)],
    callbacks=[
        lightgbm.early_stopping(5),
        nni_sdk.integrations.lightgbm.NNICallback("valid_0-auc", best="max"),
    ],
)
