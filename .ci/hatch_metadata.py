"""The umbrella's dependencies: sibling folders in a checkout, exact versions in a release."""

import os
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

BASE = {"polytrain-core": "core", "polytrain-plugins": "plugins"}

# The estimators and most examples of tree boosters use these.
TABLES = ("pandas>=2.0", "scikit-learn>=1.6")
# With another Keras, model.fit on several workers is refused.
KERAS = "keras>=3.15,<3.16"

# extra -> (distribution, its folder, the framework's requirements)
EXTRAS = {
    "torch": ("polytrain-torch", "plugin_torch", ("torch>=2.11",)),
    "lightning": ("polytrain-torch", "plugin_torch", ("torch>=2.11", "lightning>=2.6.6")),
    "accelerate": ("polytrain-torch", "plugin_torch", ("torch>=2.11", "accelerate>=1.10")),
    "transformers": (
        "polytrain-torch",
        "plugin_torch",
        ("torch>=2.11", "transformers>=5.5", "accelerate>=1.10"),
    ),
    "deepspeed": ("polytrain-torch", "plugin_torch", ("torch>=2.11", "deepspeed>=0.19")),
    "xgboost": ("polytrain-xgboost", "plugin_xgboost", ("xgboost>=3.1", *TABLES)),
    "xgboost-cpu": ("polytrain-xgboost", "plugin_xgboost", ("xgboost-cpu>=3.1", *TABLES)),
    "lightgbm": ("polytrain-lightgbm", "plugin_lightgbm", ("lightgbm>=4.7", *TABLES)),
    "tf": ("polytrain-tf", "plugin_tf", ("tensorflow>=2.21", KERAS)),
    "tf-cpu": ("polytrain-tf", "plugin_tf", ("tensorflow-cpu>=2.21", KERAS)),
    "tensorboard": ("polytrain-core", "core", ("tensorboard>=2.18",)),
    "mlflow": (
        "polytrain-core",
        "core",
        ("mlflow-skinny>=3.16", "sqlalchemy>=2.0", "alembic>=1.13"),
    ),
    "wandb": ("polytrain-core", "core", ("wandb>=0.31",)),
    "prometheus": ("polytrain-core", "core", ("prometheus-client>=0.20",)),
    "gpu-metrics": ("polytrain-core", "core", ("nvidia-ml-py>=12.535.77",)),
}

# Spelt out: `polytrain[torch]` in here would send pip to an index for the umbrella itself.
UNIONS = {
    "all": ("torch", "xgboost", "lightgbm", "tf"),
    "all-cpu": ("torch", "xgboost-cpu", "lightgbm", "tf-cpu"),
}


class SiblingDependencies(MetadataHookInterface):
    """Refer to the member distributions by path while they lie beside the umbrella.

    An sdist freezes what this hook wrote, so one that is built in a checkout needs
    `POLYTRAIN_RELEASE=1`; otherwise it would carry this machine's paths to everybody.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        def member(distribution: str, folder: str) -> str:
            path = Path(self.root, folder).resolve()
            if (path / "pyproject.toml").is_file() and not os.environ.get("POLYTRAIN_RELEASE"):
                return f"{distribution} @ {path.as_uri()}"
            return f"{distribution}=={metadata['version']}"

        extras = {
            extra: [member(distribution, folder), *frameworks]
            for extra, (distribution, folder, frameworks) in EXTRAS.items()
        }
        for union, parts in UNIONS.items():
            extras[union] = [*dict.fromkeys(each for part in parts for each in extras[part])]
        metadata["dependencies"] = [member(*sibling) for sibling in BASE.items()]
        metadata["optional-dependencies"] = extras
