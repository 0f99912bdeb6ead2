"""What AWS says no with, in words for people: what was asked, why not, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import botocore.exceptions as errors

TRIES = 6  # with pauses of up to 1, 2, 4, 8 and 16 s between them where AWS throttles
LOGIN = "log in with `aws configure` or `aws sso login`, and name the profile in AWS_PROFILE"
FOLDER = "jobs/clusters/sagemaker"

# Words in AWS's code or message, in small letters; and what they mean.
MEANINGS = {
    "expired": f"your credentials have expired; {LOGIN}",
    "security token": f"AWS does not know these credentials; {LOGIN}",
    "assume role": (
        f"SageMaker cannot act as the role. It must exist, and trust sagemaker.amazonaws.com (the stack of {FOLDER}/ "
        "makes one)"
    ),
    "nosuchentity": f"there is no such role (the stack of {FOLDER}/ makes one)",
    "denied": f"you may not do that; what a learner needs is in {FOLDER}/policies/learner.json",
    "resourcelimitexceeded": (
        "the account may not use so many instances of this type. Ask for more under Service Quotas, Amazon SageMaker, "
        "'<instance type> for training job usage' (a day or two), or take another type; new accounts have a quota of 0 "
        "for most"
    ),
    "throttl": f"AWS still asks to slow down after {TRIES} tries; wait a minute and try again",
}


class AwsError(ValueError):
    """AWS did not do what it was asked to; the message says what was asked, why not, and what to do."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code

    def _render_traceback_(self) -> list[str]:
        # As RunFailed does: the message is for people, the frames are not.
        return [f"{type(self).__name__}: {self}"]


@contextlib.contextmanager
def explained(asked: str = "AWS") -> Iterator[None]:
    """Turn what botocore raises into an AwsError that says what it means."""
    try:
        yield
    except AwsError:
        raise
    except errors.ClientError as error:
        detail = error.response.get("Error", {})
        code, said = detail.get("Code", ""), detail.get("Message", str(error))
        text = f"{code} {said}".lower()
        meaning = next((means for word, means in MEANINGS.items() if word in text), f"AWS answered {code}")
        raise AwsError(f"{asked}: {meaning}. AWS says: {said}", code) from None
    except (
        errors.BotoCoreError,
        OSError,
        ValueError,
    ) as error:  # nobody answered; boto3's own are ValueErrors, too
        advice = f"{LOGIN}. Without an account, use --on sagemaker-stand-in"
        if isinstance(error, errors.ConnectionError | errors.HTTPClientError):
            advice = "is the region's name right, and is there a network?"
        raise AwsError(f"{asked} cannot be reached: {error}; {advice}") from None
