"""A call to a cluster as a learner should meet it: patient where it asks for patience, and clear where it says no."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from typing import Any

import urllib3
from kubernetes import client, config

TRIES = 5
FIRST_PAUSE_SECONDS = 0.5  # doubled at each further try
LONGEST_PAUSE_SECONDS = 30.0
TIMEOUT_SECONDS = (10, 60)  # to connect, and for each part of an answer
BUSY = {429, 500, 502, 503, 504}
STRICT = re.compile(r"strict decoding error: (.*)", flags=re.DOTALL)
REFUSED_UNDONE = {429, 503}  # a creation that was answered so has not happened


class KubernetesError(ValueError):
    """The cluster did not do what it was asked to; the message says what was asked, why not, and what to do."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def _render_traceback_(self) -> list[str]:
        # As RunFailed does: the message is for people, the frames are not.
        return [f"{type(self).__name__}: {self}"]


def connect(context: str | None = None) -> client.ApiClient:
    """A client by KUBECONFIG or ~/.kube/config, or, in a pod, by its service account.

    Raises:
        KubernetesError: if there is neither.
    """
    configuration = client.Configuration()
    try:
        # The client itself reads the variable once, when it is imported; a notebook may set it later.
        file = os.environ.get("KUBECONFIG")
        config.load_kube_config(file, context=context, client_configuration=configuration)
    except (config.ConfigException, OSError) as outside:
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            raise KubernetesError(
                f"there is no cluster to talk to ({outside}); name a kubeconfig in KUBECONFIG. Without a cluster, "
                "--render shows what would be sent, and the place kubernetes-stand-in runs the same pods on this "
                "machine, as TorchX's scheduler local_cwd runs its nodes"
            ) from None
    configuration.retries = False  # `call` is patient itself; two that try again would multiply
    return client.ApiClient(configuration)


def call(
    asked: str, function: Callable[..., Any], *arguments: Any, creates: bool = False, passing: str = "",
    **named: Any,
) -> Any:  # fmt: skip
    """The answer of `function`. Tries again, more and more slowly, where the cluster is busy or was not reached.

    `asked` says in words what for. One that `creates` is tried again only where it certainly has not happened. A
    refusal that says `passing` is expected to pass.

    Raises:
        KubernetesError: where it is refused, or nobody answers.
    """
    for attempt in range(1, TRIES + 1):
        pause = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1)
        try:
            return function(*arguments, _request_timeout=TIMEOUT_SECONDS, **named)
        except client.ApiException as error:
            again = REFUSED_UNDONE if creates else BUSY
            passes = error.status in again or (passing and passing in said_by(error))
            if not passes or attempt == TRIES:
                raise KubernetesError(explanation(asked, error), error.status) from None
            pause = _asked_to_wait(error) or pause
        except (urllib3.exceptions.HTTPError, OSError) as error:
            unreached = isinstance(error, urllib3.exceptions.NewConnectionError)
            if attempt == TRIES or (creates and not unreached):
                raise KubernetesError(f"{asked}: the cluster does not answer ({error}); is it up?") from None
        time.sleep(min(pause, LONGEST_PAUSE_SECONDS))
    raise AssertionError("the last try returns or raises")


def explanation(asked: str, error: client.ApiException) -> str:
    """What an answer that says no means, what to do about it, and each field that it complains of."""
    said = said_by(error)
    advice = {
        400: "the cluster cannot read the object as one of its kind",
        401: "the cluster does not know you: log in again; your login has expired, or is another cluster's",
        403: "you may not do that; whoever runs the cluster grants it by a Role and a RoleBinding in the namespace",
        404: "there is no such thing; is the namespace right, and the operator for this kind installed?",
        409: "something of that name exists already; delete it, or give the job another name",
        422: "the cluster, or an operator, does not accept the object",
        429: f"the cluster still asks to slow down after {TRIES} tries; wait a minute and try again",
        500: f"the cluster still fails after {TRIES} tries; its log knows why",
    }
    found = complaints(error)
    said = "".join(f"\n  {complaint}" for complaint in found) if found else f" {said}"
    return (
        f"{asked}: {advice.get(error.status, f'the cluster answered {error.status}')}. Kubernetes says:{said}"
    )


def complaints(error: client.ApiException) -> list[str]:
    """What the cluster has against single fields, `path: what is wrong`; nothing where it complains of the whole."""
    try:
        causes = json.loads(error.body)["details"]["causes"]
        found = [f"{each['field']}: {each['message']}" for each in causes if each.get("field")]
    except (ValueError, KeyError, TypeError):  # no Status, or one without details
        found = []
    strict = STRICT.search(said_by(error))
    if strict is not None:  # unknown field "spec.x", unknown field "spec.y"
        named = re.findall(r'(\w+ field) "([^"]+)"', strict[1])
        found += [f"{path}: {what}" for what, path in named]
    return found


def said_by(error: client.ApiException) -> str:
    """The message of a Status object, or whatever came instead."""
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):  # a proxy on the way answers in its own words
        return str(error.reason or error.status)


def _asked_to_wait(error: client.ApiException) -> float | None:
    after = (error.headers or {}).get("Retry-After", "")
    return float(after) if after.isdecimal() else None
