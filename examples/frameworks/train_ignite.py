"""One trial: a small network, trained by PyTorch Ignite on scikit-learn's handwritten digits."""

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

import nni_sdk.integrations.ignite

parameters = {"learning_rate": 0.001, **(nni_sdk.get_next_parameter() or {})}
pixels, digits = load_digits(return_X_y=True)
train_x, valid_x, train_y, valid_y = map(
    torch.as_tensor,
    train_test_split((pixels / 16).astype("float32"), digits, test_size=0.25, random_state=20),
)
train = DataLoader(TensorDataset(train_x, train_y), 32, shuffle=True)
valid = DataLoader(TensorDataset(valid_x, valid_y), 512)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), parameters["learning_rate"])
trainer = create_supervised_trainer(model, optimizer, torch.nn.CrossEntropyLoss())
evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(valid))
evaluator.add_event_handler(Events.COMPLETED, nni_sdk.integrations.ignite.NNICallback("accuracy", trainer))
trainer.run(train, max_epochs=5)
print(f"accuracy {evaluator.state.metrics['accuracy']:.4f}")
