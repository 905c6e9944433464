"""One trial: a small network, trained by Lightning on scikit-learn's handwritten digits."""

import torch
from lightning import LightningModule, Trainer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import nni_sdk.integrations.lightning


class Digits(LightningModule):
    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def training_step(self, batch, _):
        pixels, digits = batch
        return cross_entropy(self.layers(pixels), digits)

    def validation_step(self, batch, _):
        pixels, digits = batch
        self.log("val_accuracy", (self.layers(pixels).argmax(1) == digits).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.learning_rate)


def main() -> None:
    parameters = {"learning_rate": 0.001, **(nni_sdk.get_next_parameter() or {})}
    pixels, digits = load_digits(return_X_y=True)
    train_x, valid_x, train_y, valid_y = map(
        torch.as_tensor,
        train_test_split((pixels / 16).astype("float32"), digits, test_size=0.25, random_state=20),
    )
    trainer = Trainer(
        max_epochs=5,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[nni_sdk.integrations.lightning.NNICallback("val_accuracy")],
    )
    trainer.fit(
        Digits(**parameters),
        DataLoader(TensorDataset(train_x, train_y), 32, shuffle=True),
        DataLoader(TensorDataset(valid_x, valid_y), 512),
    )


if __name__ == "__main__":
    main()
