"""One trial: a tiny BERT, trained by Hugging Face's Trainer; each of scikit-learn's digits is a text of 64 shades of grey."""

import tempfile

from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import nni_sdk.integrations.transformers

parameters = {"learning_rate": 0.001, **(nni_sdk.get_next_parameter() or {})}
pixels, digits = load_digits(return_X_y=True)
texts = [
    {"input_ids": row, "labels": int(digit)} for row, digit in zip(pixels.astype(int), digits, strict=True)
]
config = BertConfig(
    vocab_size=17,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
    num_labels=10,
)
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        BertForSequenceClassification(config),
        TrainingArguments(
            folder,
            num_train_epochs=3,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=64,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            **parameters,
        ),
        train_dataset=texts[:800],
        eval_dataset=texts[800:1000],
        callbacks=[nni_sdk.integrations.transformers.NNICallback("eval_loss")],
    )
    trainer.train()
