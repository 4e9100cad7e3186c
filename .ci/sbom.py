"""The software bill of materials of a distribution, as CycloneDX.

It says what the distribution contains and what it asks for. Which versions of these get installed
is decided on the user's machine, so a requirement is a component without a version.
"""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Mapping
from pathlib import Path

from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from hatchling.metadata.core import CoreMetadata
from packageurl import PackageURL
from packaging.requirements import Requirement

BUNDLED = {"polytrain-core": (PackageURL("npm", name="uplot", version="1.6.32"), "MIT")}
"""Distribution → other people's software inside it, and its licence."""

OWN_LICENCE = "Apache-2.0"


def licences(page: Path) -> dict[str, str]:
    """The licences of all requirements, from the table in docs/dependencies.md."""
    rows = re.findall(r"^\| `([\w-]+)[^`]*` \| .* \| (.*) \|$", page.read_text(), re.MULTILINE)
    return dict(rows)


def sbom(
    metadata: CoreMetadata, known_licences: Mapping[str, str], built: datetime.datetime
) -> str:
    """The document, as JSON. The same arguments give the same bytes."""
    name, version = metadata.raw_name, metadata.config["version"]
    package = PackageURL("pypi", name=name, version=version)
    itself = _component(package, metadata.license_expression)
    needed = {Requirement(each): ComponentScope.REQUIRED for each in metadata.dependencies}
    for requirements in metadata.optional_dependencies.values():
        for each in requirements:
            needed.setdefault(Requirement(each), ComponentScope.OPTIONAL)
    parts = [
        _component(
            PackageURL("pypi", name=each.name),
            OWN_LICENCE if each.name.startswith("polytrain") else known_licences[each.name],
            scope=scope,
            requirement=str(each),
        )
        for each, scope in needed.items()
    ]
    if name in BUNDLED:
        parts.append(_component(*BUNDLED[name], scope=ComponentScope.REQUIRED))
    bom = Bom(components=parts, serial_number=uuid.uuid5(uuid.NAMESPACE_URL, str(package)))
    bom.metadata.component = itself
    bom.metadata.timestamp = built
    bom.register_dependency(itself, parts)
    document: str = JsonV1Dot6(bom).output_as_string(indent=2)
    return f"{document}\n"


def _component(
    package: PackageURL,
    licence: str,
    *,
    scope: ComponentScope | None = None,
    requirement: str | None = None,
) -> Component:
    properties = [Property(name="polytrain:requirement", value=requirement)] if requirement else []
    return Component(
        type=ComponentType.LIBRARY,
        name=package.name,
        version=package.version,
        purl=package,
        bom_ref=str(package),
        scope=scope,
        licenses=[LicenseFactory().make_from_string(licence)],
        properties=properties,
    )
