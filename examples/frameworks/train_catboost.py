"""One trial: boosted trees of CatBoost on scikit-learn's breast cancer data."""

from catboost import CatBoostClassifier
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import nni_sdk.integrations.catboost

parameters = {"learning_rate": 0.1, **(nni_sdk.get_next_parameter() or {})}
train_x, valid_x, train_y, valid_y = train_test_split(*load_breast_cancer(return_X_y=True), random_state=20)
model = CatBoostClassifier(
    iterations=50, eval_metric="AUC", thread_count=1, allow_writing_files=False, **parameters
)
model.fit(
    train_x,
    train_y,
    eval_set=(valid_x, valid_y),
    callbacks=[nni_sdk.integrations.catboost.NNICallback("validation-AUC")],
)
