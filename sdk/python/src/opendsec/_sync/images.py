# Made by tools/generate_sync.py from opendsec/_async/images.py. DO NOT EDIT.
"""Images: bring them in, look at them, take their names away."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Callable, Sequence
from typing import Any

from connectrpc.errors import ConnectError

from .. import _wire
from .._args import invalid
from .._gen.opendsec.v1 import image_pb
from .._gen.opendsec.v1.image_connect import ImageServiceClientSync
from .._values import Image, Progress
from ..errors import DSecError
from ._concurrent import call, closing, reraise_cancelled
from .connection import Connection

ImageProgress = Callable[[Progress], Any]


class Images:
    """The images that a project sees: its own and those of the projects above it."""

    def __init__(self, conn: Connection, api: ImageServiceClientSync, project: str) -> None:
        self._conn = conn
        self._api = api
        self._project = project

    def list(self) -> builtins.list[Image]:
        """Return the images that the client's project sees, by name."""
        request = image_pb.ListImagesRequest(project=self._project)
        answer = self._conn.call(self._api.list_images, request)
        return [_wire.image(image) for image in answer.images]

    def get(self, name: str) -> Image:
        """Return an image by its name, ``project/name:tag``.

        Raises:
            NotFoundError: there is none, or it is not to be seen from here.
        """
        answer = self._conn.call(self._api.get_image, image_pb.GetImageRequest(name=image_name(name)))
        return image_of(answer.image, name)

    def tag(self, name: str, new_name: str) -> Image:
        """Give an image a further name and return it under that."""
        request = image_pb.TagImageRequest(name=image_name(name), new_name=image_name(new_name, "new_name"))
        answer = self._conn.call(self._api.tag_image, request)
        return image_of(answer.image, new_name)

    def delete(self, name: str) -> None:
        """Take a name away. The content goes with its last name, once no sandbox uses it.

        Raises:
            NotFoundError: there is no such name.
        """
        self._conn.call(
            self._api.delete_image, image_pb.DeleteImageRequest(name=image_name(name)), once=True
        )

    def import_image(
        self,
        source: str,
        name: str,
        progress: ImageProgress | None = None,
        *,
        username: str | None = None,
        password: str | None = None,
        ca: bytes = b"",
        insecure: bool = False,
        architecture: str = "",
    ) -> Image:
        """Fetch an OCI image and give it a name.

        Args:
            source: ``docker.io/library/python:3.12``, or ``docker-archive:PATH``, ``oci:PATH[:TAG]``,
                ``oci-archive:PATH[:TAG]`` with a path on the node.
            name: ``project/name:tag``.
            progress: called as it goes on.
            username, password: login at the registry.
            ca: certificate authorities to trust besides the node's own, PEM.
            insecure: whether plain HTTP may be used.
            architecture: ``amd64`` unless given.
        """
        auth = None
        if username is not None or password is not None:
            auth = image_pb.RegistryAuth(username=username or "", password=password or "")
        request = image_pb.ImportImageRequest(
            source=source,
            name=image_name(name),
            auth=auth,
            ca_pem=ca,
            insecure=insecure,
            architecture=architecture,
        )
        return self._follow(self._api.import_image(request, headers=self._conn.headers), name, progress)

    def bootstrap(
        self,
        distribution: str,
        name: str,
        packages: Sequence[str] = (),
        progress: ImageProgress | None = None,
    ) -> Image:
        """Build a base image from the node's own package mirror.

        Args:
            distribution: ``debian``.
            name: ``project/name:tag``.
            packages: besides the base and the defaults (Python with pip, curl, git).
            progress: called as it goes on.
        """
        request = image_pb.BootstrapImageRequest(
            distribution=distribution, name=image_name(name), packages=builtins.list(packages)
        )
        return self._follow(
            self._api.bootstrap_image(request, headers=self._conn.headers), name, progress
        )

    def _follow(
        self, stream: Iterator[image_pb.ImportImageResponse], name: str, progress: ImageProgress | None
    ) -> Image:
        made: Image | None = None
        try:
            with closing(stream) as answers:
                for answer in answers:
                    if answer.image is not None:
                        made = _wire.image(answer.image)
                    if progress is not None:
                        call(progress, _wire.progress(answer))
        except ConnectError as err:
            reraise_cancelled(err)
            raise self._conn.error(err) from err
        if made is None:
            raise DSecError(f"the server did not say how the import of {name} ended; look with images.get")
        return made


def image_name(name: str, field: str = "name") -> str:
    """Check an image's name."""
    if not isinstance(name, str) or not name:
        raise invalid(field, f"{name!r} is not an image name; give project/name:tag")
    return name


def image_of(image: image_pb.Image | None, name: str) -> Image:
    """Return an image of an answer, which must hold one."""
    if image is None:
        raise DSecError(f"the server said nothing about image {name}")
    return _wire.image(image)
