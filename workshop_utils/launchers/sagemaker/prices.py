"""What instances cost: a small table with its date.

No package carries the prices of SageMaker's instances. These are on-demand training prices of us-east-1 in US dollars
an hour as they were known in 2025, written down without access to AWS's price page and not checked against it since;
other regions cost up to a third more. They are for a sense of scale, and for the question that comes before each
launch. AWS's invoice is what counts.
"""

from __future__ import annotations

AS_OF = "2025"
DOLLARS_AN_HOUR = {
    "ml.m5.large": 0.115,
    "ml.m5.xlarge": 0.23,
    "ml.m5.2xlarge": 0.461,
    "ml.m5.4xlarge": 0.922,
    "ml.c5.xlarge": 0.204,
    "ml.c5.2xlarge": 0.408,
    "ml.c5.4xlarge": 0.816,
    "ml.c5.9xlarge": 1.836,
    "ml.c5.18xlarge": 3.672,
    "ml.g4dn.xlarge": 0.736,
    "ml.g5.xlarge": 1.408,
    "ml.p3.2xlarge": 3.825,
    "ml.p3.8xlarge": 14.688,
    "ml.p3.16xlarge": 28.152,
}
