"""Data pipelines on Spark: `pip install 'pgqrs[spark]'`."""

from pgqrs.spark.allowing import allow
from pgqrs.spark.claims import Claim, acknowledge, claim
from pgqrs.spark.ending import finish
from pgqrs.spark.frames import Frame
from pgqrs.spark.java import java_home
from pgqrs.spark.session import current_session, register, session
from pgqrs.spark.steps import Attempt, current_attempt, spark_step
from pgqrs.spark.sweeping import Swept, sweep

__all__ = [
    "Attempt",
    "Claim",
    "Frame",
    "Swept",
    "acknowledge",
    "allow",
    "claim",
    "current_attempt",
    "current_session",
    "finish",
    "java_home",
    "register",
    "session",
    "spark_step",
    "sweep",
]
