"""What instances cost: a small table with its date, which settings can override and AWS's price list refresh.

No package carries the prices of SageMaker's instances. These are on-demand training prices of us-east-1 in US dollars
an hour as they were known in 2025, written down without access to AWS's price page and not checked against it since;
other regions cost up to a third more. They are for a sense of scale, and for the question that comes before each
launch. With an account AWS's own price list is asked first, and AWS's invoice is what counts.
"""

from __future__ import annotations

import json
from typing import Any

from workshop_utils.launchers.sagemaker.calls import Aws, AwsError

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
PRICE_LIST_REGION = "us-east-1"  # the price list is served from few regions, for all


def dollars_an_hour(instance_type: str) -> float | None:
    """The price in the table; None where it has none."""
    return DOLLARS_AN_HOUR.get(instance_type)


def from_price_list(aws: Aws, instance_type: str) -> float | None:
    """Today's price in the region of `aws`, from AWS's price list; None where it does not say.

    Source: AWS Price List Query API, GetProducts with the service code AmazonSageMaker.
    """
    wanted = {"instanceName": instance_type, "component": "Training", "regionCode": aws.region}
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()]
    prices = Aws(PRICE_LIST_REGION, aws.endpoint, aws.credentials, aws.clients)
    try:
        answer = prices.call("pricing", "get_products", ServiceCode="AmazonSageMaker", Filters=filters)
    except AwsError:
        return None  # it takes a permission that not everybody has, and the table stands in
    found = [price for text in answer.get("PriceList", []) for price in _on_demand(json.loads(text))]
    return min(found, default=None)


def _on_demand(product: dict[str, Any]) -> list[float]:
    """The prices an hour, more than nothing, that one product of the price list names."""
    terms = product.get("terms", {}).get("OnDemand", {}).values()
    dimensions = [each for term in terms for each in term.get("priceDimensions", {}).values()]
    prices = [float(each.get("pricePerUnit", {}).get("USD", 0)) for each in dimensions]
    return [price for price in prices if price > 0]
