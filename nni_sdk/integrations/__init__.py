"""Callbacks for training frameworks: `from nni_sdk.integrations.keras import NNICallback`.

One module per framework, named as the framework's package. It imports the framework, and nothing else imports it. `reporter` has
what all callbacks do; a module only maps its framework's protocol to it. Runs in the training process: Python 3.7 and later.
"""
