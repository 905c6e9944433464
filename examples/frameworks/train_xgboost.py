"""One trial: boosted trees of XGBoost on scikit-learn's breast cancer data."""

import xgboost
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import nni_sdk.integrations.xgboost

parameters = {"learning_rate": 0.1, **(nni_sdk.get_next_parameter() or {})}
train_x, valid_x, train_y, valid_y = train_test_split(*load_breast_cancer(return_X_y=True), random_state=20)
model = xgboost.train(
    {"objective": "binary:logistic", "eval_metric": "auc", "nthread": 1, **parameters},
    xgboost.DMatrix(train_x, train_y),
    num_boost_round=50,
    evals=[(xgboost.DMatrix(valid_x, valid_y), "valid")],
    callbacks=[nni_sdk.integrations.xgboost.NNICallback("valid-auc")],
)
