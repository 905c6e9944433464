"""One trial: a small network of Keras on scikit-learn's handwritten digits."""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nni_sdk.integrations.keras

parameters = {"learning_rate": 0.001, **(nni_sdk.get_next_parameter() or {})}
pixels, digits = load_digits(return_X_y=True)
train_x, valid_x, train_y, valid_y = train_test_split(pixels / 16, digits, test_size=0.25, random_state=20)
model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")])
model.compile(keras.optimizers.Adam(**parameters), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    train_x,
    train_y,
    epochs=5,
    validation_data=(valid_x, valid_y),
    verbose=2,
    callbacks=[nni_sdk.integrations.keras.NNICallback("val_accuracy")],
)
