"""One trial: a small network, trained by fastai on scikit-learn's handwritten digits."""

import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import nni_sdk.integrations.fastai

parameters = {"learning_rate": 0.001, **(nni_sdk.get_next_parameter() or {})}
pixels, digits = load_digits(return_X_y=True)
train_x, valid_x, train_y, valid_y = map(
    torch.as_tensor,
    train_test_split((pixels / 16).astype("float32"), digits, test_size=0.25, random_state=20),
)
train = DataLoader(TensorDataset(train_x, train_y), 32, shuffle=True)
valid = DataLoader(TensorDataset(valid_x, valid_y), 512)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
learner = Learner(DataLoaders(train, valid), model, loss_func=cross_entropy, metrics=accuracy)
learner.fit(
    5,
    parameters["learning_rate"],
    cbs=nni_sdk.integrations.fastai.NNICallback("accuracy"),
)
