"""The section of a configuration whose class depends on the platform."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, make_dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic.alias_generators import to_snake

from nni_manager.config.dialect import SERVICE
from nni_manager.config.keys import keys_on
from nni_manager.config.platforms import BY_V1, PLATFORMS, UNSUPPORTED
from nni_manager.errors import UserError
from nni_manager.experiment.aliases import ConfigBase

AnySection = TypeVar("AnySection", bound="PlatformSection")


class PlatformUnknown(UserError):
    """cannot run an experiment on this platform; use one of local, openpai, frameworkcontroller, kubeflow, slurm, remote"""


class PlatformSection(ConfigBase):
    """The training service of any platform; each platform has a subclass."""

    @classmethod
    def of_mapping(cls: type[AnySection], fields: Mapping[str, Any]) -> AnySection:
        """The training service that a mapping with `platform` describes.

        Raises:
            PlatformUnknown: the platform is unknown.
        """
        return cls.for_platform(fields.get("platform"))(**fields)

    @classmethod
    def for_platform(cls: type[AnySection], platform: Any) -> type[AnySection]:
        """The class of the training service for a platform.

        Raises:
            PlatformUnknown: the platform is unknown or not supported.
        """
        if isinstance(platform, list) and len(platform) == 1:
            return cls.for_platform(platform[0])
        if isinstance(platform, str) and platform in PLATFORMS:
            classes = (each for each in cls.__subclasses__() if vars(each)["platform"] == platform)
            return next(classes, None) or _class_for(cls, platform)
        known = ", ".join(PLATFORMS)
        why = f"there is no such platform; use one of {known}"
        if isinstance(platform, list):
            why = f"an experiment runs on one platform; use one of {known}"
        elif platform in BY_V1:
            why = f'the name of {BY_V1[platform].title} is "{BY_V1[platform].name}"; use that'
        elif platform in UNSUPPORTED:
            why = f"{UNSUPPORTED[platform].reason.partition(';')[0]}; use one of {known}"
        raise PlatformUnknown(f"cannot run an experiment on {platform!r}: {why}")


@cache
def _class_for(base: type[AnySection], platform: str) -> type[AnySection]:
    """The class for a platform that NNI does not have: its fields are the keys of the platform, without types."""
    inherited = base.field_names()
    keys = {key.path[1] for key in keys_on(platform) if key.path[:1] == SERVICE and len(key.path) > 1}
    names = [name for name in map(to_snake, sorted(keys)) if name not in inherited]
    return make_dataclass(
        f"{platform.title()}Config",
        [
            ("platform", "str | None", field(default=platform)),
            *((name, Any, field(default=None)) for name in names),
        ],
        bases=(base,),
        kw_only=True,
    )
