"""One trial: a linear model on scikit-learn's handwritten digits, trained by passes of `partial_fit`."""

from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import train_test_split

import nni_sdk.integrations.sklearn

parameters = {"learning_rate": 0.01, **(nni_sdk.get_next_parameter() or {})}
pixels, digits = load_digits(return_X_y=True)
train_x, valid_x, train_y, valid_y = train_test_split(pixels / 16, digits, test_size=0.25, random_state=20)
model = SGDClassifier(learning_rate="constant", eta0=parameters["learning_rate"], random_state=20)
for _ in nni_sdk.integrations.sklearn.NNICallback("accuracy").passes(range(10), model, valid_x, valid_y):
    model.partial_fit(train_x, train_y, classes=range(10))
print(f"accuracy {model.score(valid_x, valid_y):.4f}")
