"""Limits and waiting are apart from the queue's row; PostgreSQL claims within limits by a function."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import (
    BigId,
    Flag,
    Json,
    Small,
    UTCDateTime,
    forget,
    is_applied,
    record,
    schema_of,
)

revision = "pgqrs_0013"
down_revision = "pgqrs_0012"
branch_labels = None
depends_on = None

MOVED = {"waiting_until": UTCDateTime, "results_wanted_until": UTCDateTime, "rate_taken": Json}
PARKED = "ix_pgqrs_messages_parked"
SIGNATURE = (
    "pgqrs_claim_limited(TEXT, BIGINT, INTEGER, DOUBLE PRECISION, BIGINT, TIMESTAMP WITH TIME ZONE)"
)

# About the bytes of a payload. Only one that is compressed or large is read for that.
SIZE = """CASE
                        WHEN pg_column_size(m.payload) < 2000
                            AND pg_column_compression(m.payload) IS NULL
                        THEN pg_column_size(m.payload)
                        ELSE octet_length(CAST(m.payload AS TEXT))
                    END"""

# Claims within the limits of a queue. All of it happens in one statement of the client, so that no
# client can stop in the middle with the lock. Each statement in here sees what was committed before it
# began: that is why the lock comes first, and the time after it.
#
# No row is returned if there is no such queue.
#
# With the lock taken, nothing in here waits: messages that somebody else has locked are passed over.
CLAIM = """
CREATE FUNCTION pgqrs_claim_limited(
    for_queue TEXT,
    for_worker BIGINT,
    at_most INTEGER,
    for_seconds DOUBLE PRECISION,
    max_bytes BIGINT,
    at_time TIMESTAMP WITH TIME ZONE,
    OUT claimer_status TEXT,
    OUT has_limits BOOLEAN,
    OUT has_leftovers BOOLEAN,
    OUT room_in DOUBLE PRECISION,
    OUT claimed_ids BIGINT[],
    OUT claimed_tokens INTEGER[],
    OUT claimed_bytes BIGINT
) RETURNS SETOF RECORD
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $claim$
DECLARE
    LOOK_AT CONSTANT INTEGER := 100;
    PAGES CONSTANT INTEGER := 21;
    AT_ONCE CONSTANT INTEGER := 1000;
    GRAINS CONSTANT INTEGER := 50;
    queue RECORD;
    state RECORD;
    present TIMESTAMP WITH TIME ZONE;
    present_epoch DOUBLE PRECISION;
    counts_slots BOOLEAN;
    is_changed BOOLEAN := false;
    returned BIGINT[];
    dead BIGINT[];
    freed TEXT[];
    ended INTEGER;
    let_in_ids BIGINT[];
    room BIGINT;
    log JSONB;
    taken_lately BIGINT;
    forgotten INTEGER;
    was_set_back BOOLEAN;
    last_since DOUBLE PRECISION;
    last_until DOUBLE PRECISION;
    started INTEGER := 0;
    looked INTEGER;
    wanted INTEGER;
    has_expired BOOLEAN;
    is_full BOOLEAN;
    more_bytes BIGINT;
    picked BIGINT[];
    parked BIGINT[];
    held_ids BIGINT[];
    held_tokens INTEGER[];
BEGIN
    LOOP
        SELECT * INTO state FROM pgqrs_limits l
            WHERE l.queue_id = (SELECT q.id FROM pgqrs_queues q WHERE q.queue_name = for_queue)
            FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO pgqrs_limits (queue_id)
            SELECT q.id FROM pgqrs_queues q WHERE q.queue_name = for_queue FOR KEY SHARE
            ON CONFLICT DO NOTHING;
        PERFORM FROM pgqrs_queues q WHERE q.queue_name = for_queue;
        IF NOT FOUND THEN
            RETURN;
        END IF;
    END LOOP;
    present := coalesce(at_time, clock_timestamp());
    present_epoch := extract(epoch FROM present);
    -- Only now: its settings may have changed while this waited.
    SELECT q.*, w.status AS of_worker INTO queue
        FROM pgqrs_queues q LEFT JOIN pgqrs_workers w ON w.id = for_worker
        WHERE q.id = state.queue_id;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    claimer_status := queue.of_worker;
    has_limits := true;
    has_leftovers := false;
    claimed_ids := '{}';
    claimed_tokens := '{}';
    claimed_bytes := 0;
    max_bytes := coalesce(max_bytes, 9223372036854775807);
    IF queue.paused OR claimer_status IS DISTINCT FROM 'ready' THEN
        RETURN NEXT;
        RETURN;
    END IF;
    counts_slots := queue.max_in_flight IS NOT NULL OR queue.max_in_flight_per_key IS NOT NULL;

    -- What came back joins the ready ones, unless it may not be handed out any more.
    SELECT array_agg(d.id) FILTER (WHERE NOT d.gone), array_agg(d.id) FILTER (WHERE d.gone)
        INTO returned, dead
        FROM (
            SELECT m.id, coalesce(m.expires_at <= present, false) OR (
                    m.consumer_worker_id IS NOT NULL
                    AND m.read_ct - m.released_ct >= queue.max_read_ct
                ) AS gone
            FROM pgqrs_messages m
            WHERE m.queue_id = queue.id AND NOT m.ready AND m.blocked = 0 AND m.vt <= present
            ORDER BY m.vt
            LIMIT AT_ONCE
            FOR UPDATE SKIP LOCKED
        ) d;
    IF returned IS NOT NULL THEN
        UPDATE pgqrs_messages m SET ready = true WHERE m.id = ANY (returned);
    END IF;
    has_leftovers := dead IS NOT NULL OR coalesce((
        SELECT m.expires_at FROM pgqrs_messages m
        WHERE m.queue_id = queue.id AND m.expires_at IS NOT NULL
        ORDER BY m.expires_at
        LIMIT 1
    ) <= present, false);

    -- The limits are others than before, or there are none any more: what was parked starts over.
    IF (state.max_in_flight, state.max_in_flight_per_key)
            IS DISTINCT FROM (queue.max_in_flight, queue.max_in_flight_per_key)
        OR NOT counts_slots AND queue.rate_limit IS NULL THEN
        SELECT array_agg(p.id) INTO let_in_ids FROM (
            SELECT m.id FROM pgqrs_messages m
            WHERE m.queue_id = queue.id AND m.blocked = 2
            LIMIT AT_ONCE
            FOR UPDATE SKIP LOCKED
        ) p;
        UPDATE pgqrs_messages m SET ready = true, blocked = 0 WHERE m.id = ANY (let_in_ids);
        IF counts_slots THEN
            INSERT INTO pgqrs_slots (message_id, queue_id, dedup_key, read_ct, let_in)
                SELECT m.id, m.queue_id, m.dedup_key, m.read_ct, false
                FROM pgqrs_messages m
                WHERE m.queue_id = queue.id AND NOT m.ready AND m.blocked = 0
                    AND m.consumer_worker_id IS NOT NULL AND m.vt > present
                ON CONFLICT DO NOTHING;
        ELSE
            DELETE FROM pgqrs_slots s WHERE s.queue_id = queue.id;
        END IF;
        PERFORM FROM pgqrs_messages m WHERE m.queue_id = queue.id AND m.blocked = 2 LIMIT 1;
        IF NOT FOUND THEN
            IF NOT counts_slots AND queue.rate_limit IS NULL THEN
                DELETE FROM pgqrs_limits l WHERE l.queue_id = queue.id;
                has_limits := false;
                RETURN NEXT;
                RETURN;
            END IF;
            state.max_in_flight := queue.max_in_flight;
            state.max_in_flight_per_key := queue.max_in_flight_per_key;
        END IF;
        is_changed := true;
    END IF;

    room := at_most;
    IF counts_slots THEN
        -- A slot ends with its claim. A lapsed one that somebody has locked may be renewed just now.
        WITH gone AS (
            DELETE FROM pgqrs_slots s
            WHERE s.queue_id = queue.id AND NOT EXISTS (
                SELECT FROM pgqrs_messages m
                WHERE m.id = s.message_id AND m.blocked = 0 AND CASE
                    WHEN s.let_in THEN m.ready
                    ELSE NOT m.ready AND m.read_ct = s.read_ct
                        AND m.consumer_worker_id IS NOT NULL
                        AND (dead IS NULL OR m.id <> ALL (dead))
                END
            )
            RETURNING s.dedup_key
        )
        SELECT count(*), array_agg(DISTINCT g.dedup_key) FILTER (WHERE g.dedup_key IS NOT NULL)
            INTO ended, freed FROM gone g;
        is_changed := is_changed OR ended > 0;

        -- The first of those that are parked or were let in, as many as there is room for.
        IF freed IS NOT NULL AND queue.max_in_flight_per_key IS NOT NULL THEN
            SELECT array_agg(p.id) INTO let_in_ids
                FROM unnest(freed) AS f (key)
                CROSS JOIN LATERAL (
                    SELECT queue.max_in_flight_per_key - count(*) AS room
                    FROM pgqrs_slots s
                    WHERE s.queue_id = queue.id AND s.dedup_key = f.key AND NOT s.let_in
                ) r
                CROSS JOIN LATERAL (
                    SELECT o.id, o.priority,
                        row_number() OVER (ORDER BY o.priority DESC, o.id) AS place
                    FROM (
                        SELECT m.id, m.priority FROM pgqrs_messages m
                        WHERE m.queue_id = queue.id AND m.blocked = 2 AND m.dedup_key = f.key
                        ORDER BY m.priority DESC, m.id
                        LIMIT greatest(r.room, 0)
                        FOR UPDATE SKIP LOCKED
                    ) o
                ) p
                WHERE p.place + (
                    SELECT count(*) FROM pgqrs_slots s JOIN pgqrs_messages m ON m.id = s.message_id
                    WHERE s.queue_id = queue.id AND s.dedup_key = f.key AND s.let_in
                        AND (m.priority > p.priority OR m.priority = p.priority AND m.id < p.id)
                ) <= r.room;
            INSERT INTO pgqrs_slots (message_id, queue_id, dedup_key, read_ct, let_in)
                SELECT m.id, m.queue_id, m.dedup_key, m.read_ct, true
                FROM pgqrs_messages m WHERE m.id = ANY (let_in_ids)
                ON CONFLICT DO NOTHING;
            UPDATE pgqrs_messages m SET ready = true, blocked = 0 WHERE m.id = ANY (let_in_ids);
            -- A key whose parked messages are all locked by others is looked at again next time.
            INSERT INTO pgqrs_slots (message_id, queue_id, dedup_key, read_ct, let_in)
                SELECT p.id, queue.id, f.key, p.read_ct, true
                FROM unnest(freed) AS f (key)
                CROSS JOIN LATERAL (
                    SELECT m.id, m.read_ct FROM pgqrs_messages m
                    WHERE m.queue_id = queue.id AND m.blocked = 2 AND m.dedup_key = f.key
                    LIMIT 1
                ) p
                WHERE NOT EXISTS (
                    SELECT FROM pgqrs_slots s WHERE s.queue_id = queue.id AND s.dedup_key = f.key
                )
                ON CONFLICT DO NOTHING;
        END IF;
        IF queue.max_in_flight IS NOT NULL THEN
            room := least(room, queue.max_in_flight - (
                SELECT count(*) FROM pgqrs_slots s WHERE s.queue_id = queue.id AND NOT s.let_in
            ));
        END IF;
    END IF;

    -- What started within the last period: the end of the log.
    IF queue.rate_limit IS NOT NULL THEN
        log := coalesce(state.rate_taken, '[]');
        SELECT coalesce(sum((e.value ->> 2)::INTEGER)
                    FILTER (WHERE e.until > present_epoch - queue.rate_period), 0),
                count(*) FILTER (WHERE e.until <= present_epoch - queue.rate_period),
                coalesce(max(e.until), 0) > present_epoch
            INTO taken_lately, forgotten, was_set_back
            FROM (
                SELECT j.value, (j.value ->> 1)::DOUBLE PRECISION AS until
                FROM jsonb_array_elements(log) AS j (value)
            ) e;
        -- A clock that was set back must not stop the queue: what lies ahead of it starts now.
        IF was_set_back OR forgotten >= GRAINS THEN
            SELECT coalesce(jsonb_agg(jsonb_build_array(
                        least((e.value ->> 0)::DOUBLE PRECISION, present_epoch),
                        least((e.value ->> 1)::DOUBLE PRECISION, present_epoch),
                        (e.value ->> 2)::INTEGER
                    ) ORDER BY e.ordinality), '[]')
                INTO log
                FROM jsonb_array_elements(log) WITH ORDINALITY AS e (value, ordinality)
                WHERE e.ordinality > forgotten;
            forgotten := 0;
            is_changed := is_changed OR was_set_back;
        END IF;
        room := least(room, greatest(0, queue.rate_limit - taken_lately));
    END IF;

    FOR page_number IN 1 .. PAGES LOOP
        EXIT WHEN room <= 0 OR claimed_bytes >= max_bytes;
        IF queue.max_in_flight_per_key IS NULL THEN
            wanted := room;
            parked := NULL;
            WITH page AS MATERIALIZED (
                SELECT m.id, m.priority, coalesce(m.expires_at <= present, false) AS expired,
                    {size} AS size
                FROM pgqrs_messages m
                WHERE m.queue_id = queue.id AND m.ready
                ORDER BY m.priority DESC, m.id
                LIMIT wanted
                FOR UPDATE SKIP LOCKED
            ), counted AS (
                SELECT p.id, p.size, claimed_bytes - p.size
                    + sum(p.size) OVER (ORDER BY p.priority DESC, p.id) AS before
                FROM page p WHERE NOT p.expired
            )
            SELECT array_agg(c.id) FILTER (WHERE c.before < max_bytes),
                    sum(c.size) FILTER (WHERE c.before < max_bytes), bool_or(c.before >= max_bytes),
                    (SELECT count(*) FROM page), (SELECT bool_or(p.expired) FROM page p)
                INTO picked, more_bytes, is_full, looked, has_expired FROM counted c;
        ELSE
            -- Nearly always the first have room. If not, there may be many that have none.
            wanted := CASE page_number WHEN 1 THEN room ELSE greatest(room, LOOK_AT) END;
            WITH page AS MATERIALIZED (
                SELECT m.id, m.dedup_key, m.priority,
                    coalesce(m.expires_at <= present, false) AS expired, {size} AS size
                FROM pgqrs_messages m
                WHERE m.queue_id = queue.id AND m.ready
                ORDER BY m.priority DESC, m.id
                LIMIT wanted
                FOR UPDATE SKIP LOCKED
            ), judged AS (
                SELECT p.id, p.priority, p.size, p.dedup_key IS NULL
                    OR row_number() OVER (PARTITION BY p.dedup_key ORDER BY p.priority DESC, p.id)
                    + coalesce(s.number, 0) <= queue.max_in_flight_per_key AS fits
                FROM page p
                LEFT JOIN (
                    -- A slot of what is ready ended after slots were looked at: it counts no more, or
                    -- the message would be parked behind itself.
                    SELECT s.dedup_key, count(*) AS number FROM pgqrs_slots s
                    WHERE s.queue_id = queue.id AND NOT s.let_in
                        AND s.message_id NOT IN (SELECT p.id FROM page p)
                    GROUP BY s.dedup_key
                ) s ON s.dedup_key = p.dedup_key
                WHERE NOT p.expired
            ), counted AS (
                SELECT j.id, j.fits, j.size,
                    sum(j.fits::INTEGER) OVER inclusive AS taken,
                    claimed_bytes + coalesce(
                        sum(j.size) FILTER (WHERE j.fits) OVER exclusive, 0
                    ) AS before
                FROM judged j
                WINDOW inclusive AS (ORDER BY j.priority DESC, j.id),
                    exclusive AS (
                        ORDER BY j.priority DESC, j.id
                        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
                    )
            ), fitting AS (
                SELECT c.* FROM counted c WHERE c.taken <= room
            )
            -- Only while all that fitted before it is picked: then its key is really full.
            SELECT array_agg(f.id) FILTER (WHERE f.fits AND f.before < max_bytes),
                    array_agg(f.id) FILTER (WHERE NOT f.fits AND f.before < max_bytes),
                    sum(f.size) FILTER (WHERE f.fits AND f.before < max_bytes),
                    bool_or(f.fits AND f.before >= max_bytes),
                    (SELECT count(*) FROM page), (SELECT bool_or(p.expired) FROM page p)
                INTO picked, parked, more_bytes, is_full, looked, has_expired FROM fitting f;
        END IF;
        IF picked IS NOT NULL THEN
            WITH held AS (
                UPDATE pgqrs_messages m
                SET ready = false, read_ct = m.read_ct + 1, dequeued_at = present,
                    consumer_worker_id = for_worker,
                    vt = present + coalesce(for_seconds, queue.lease) * interval '1 second'
                WHERE m.id = ANY (picked)
                RETURNING m.id, m.read_ct, m.dedup_key
            ), kept AS (
                INSERT INTO pgqrs_slots (message_id, queue_id, dedup_key, read_ct, let_in)
                SELECT h.id, queue.id, h.dedup_key, h.read_ct, false FROM held h WHERE counts_slots
                ON CONFLICT (message_id) DO UPDATE
                    SET read_ct = excluded.read_ct, let_in = false, dedup_key = excluded.dedup_key
            )
            SELECT array_agg(h.id), array_agg(h.read_ct) INTO held_ids, held_tokens FROM held h;
            claimed_ids := claimed_ids || held_ids;
            claimed_tokens := claimed_tokens || held_tokens;
            room := room - cardinality(held_ids);
            started := started + cardinality(held_ids);
            claimed_bytes := claimed_bytes + more_bytes;
        END IF;
        IF parked IS NOT NULL THEN
            UPDATE pgqrs_messages m SET ready = false, blocked = 2 WHERE m.id = ANY (parked);
            DELETE FROM pgqrs_slots s WHERE s.message_id = ANY (parked);
            is_changed := true;
        END IF;
        has_leftovers := has_leftovers OR coalesce(has_expired, false);
        EXIT WHEN looked < wanted OR has_expired OR is_full;
    END LOOP;

    IF queue.rate_limit IS NOT NULL THEN
        IF started > 0 THEN
            -- Starts close to each other share an entry, which keeps the log short.
            last_since := (log -> -1 ->> 0)::DOUBLE PRECISION;
            last_until := (log -> -1 ->> 1)::DOUBLE PRECISION;
            IF present_epoch - last_since < queue.rate_period / GRAINS THEN
                log := jsonb_set(log, '{-1}', jsonb_build_array(
                    last_since, greatest(last_until, present_epoch),
                    (log -> -1 ->> 2)::INTEGER + started
                ));
            ELSE
                log := log || jsonb_build_array(
                    jsonb_build_array(present_epoch, present_epoch, started)
                );
            END IF;
        END IF;
        IF taken_lately + started >= queue.rate_limit THEN
            room_in := greatest(
                0, (log -> forgotten ->> 1)::DOUBLE PRECISION + queue.rate_period - present_epoch
            );
        END IF;
    END IF;
    -- Also without a rate: a transaction that still sees an older state is told that it changed.
    IF is_changed OR started > 0 THEN
        UPDATE pgqrs_limits l
            SET rate_taken = log, max_in_flight = state.max_in_flight,
                max_in_flight_per_key = state.max_in_flight_per_key
            WHERE l.queue_id = queue.id;
    END IF;
    RETURN NEXT;
END
$claim$
""".replace("{size}", SIZE)


def upgrade() -> None:
    if is_applied(op, revision):
        return
    schema = schema_of(op)
    op.create_table(
        "pgqrs_waiting",
        sa.Column("queue_id", BigId, nullable=False, autoincrement=False),
        sa.Column("waiting_until", UTCDateTime, nullable=True),
        sa.Column("results_wanted_until", UTCDateTime, nullable=True),
        sa.PrimaryKeyConstraint("queue_id", name="pk_pgqrs_waiting"),
        sqlite_strict=True,
    )
    op.create_table(
        "pgqrs_limits",
        sa.Column("queue_id", BigId, nullable=False, autoincrement=False),
        sa.Column("max_in_flight", sa.Integer, nullable=True),
        sa.Column("max_in_flight_per_key", sa.Integer, nullable=True),
        sa.Column("rate_taken", Json, nullable=True),
        sa.PrimaryKeyConstraint("queue_id", name="pk_pgqrs_limits"),
        sqlite_strict=True,
    )
    # What is in flight gets its slot again with the next claim, and nothing is parked until then.
    op.drop_table("pgqrs_slots", schema=schema)
    create_slots(sa.Column("let_in", Flag, nullable=False))
    unpark()
    op.drop_index(PARKED, "pgqrs_messages", schema=schema)
    create_parked(sa.text("priority DESC"))
    for name in MOVED:
        op.drop_column("pgqrs_queues", name, schema=schema)
    if op.get_context().dialect.name == "postgresql":
        op.execute(sa.text(in_schema(CLAIM)))
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    schema = schema_of(op)
    if op.get_context().dialect.name == "postgresql":
        op.execute(sa.text(f"DROP FUNCTION {in_schema(SIGNATURE)}"))
    for name, kind in MOVED.items():
        op.add_column("pgqrs_queues", sa.Column(name, kind, nullable=True), schema=schema)
    unpark()
    op.drop_index(PARKED, "pgqrs_messages", schema=schema)
    create_parked()
    for table in ("slots", "limits", "waiting"):
        op.drop_table(f"pgqrs_{table}", schema=schema)
    create_slots()


def create_slots(*more: sa.Column) -> None:
    op.create_table(
        "pgqrs_slots",
        sa.Column("message_id", BigId, nullable=False, autoincrement=False),
        sa.Column("queue_id", BigId, nullable=False),
        sa.Column("dedup_key", sa.Text, nullable=True),
        sa.Column("read_ct", sa.Integer, nullable=False),
        *more,
        sa.PrimaryKeyConstraint("message_id", name="pk_pgqrs_slots"),
        sqlite_strict=True,
    )
    op.create_index("ix_pgqrs_slots_queue", "pgqrs_slots", ["queue_id", "dedup_key"])


def create_parked(*priority: sa.TextClause) -> None:
    op.create_index(
        PARKED,
        "pgqrs_messages",
        ["queue_id", "dedup_key", *priority, "id"],
        postgresql_where=sa.text("blocked = 2"),
        sqlite_where=sa.text("blocked = 2"),
    )


def unpark() -> None:
    """Let in all that waits for a key; who claims next parks what has no room."""
    messages = sa.Table(
        "pgqrs_messages", sa.MetaData(), sa.Column("ready", Flag), sa.Column("blocked", Small)
    )
    op.execute(sa.update(messages).where(messages.c.blocked == 2).values(ready=True, blocked=0))


def in_schema(text: str) -> str:
    """The same, with our tables and functions in their schema."""
    schema = schema_of(op)
    if schema is None:
        return text
    quoted = op.get_context().dialect.identifier_preparer.quote(schema)
    return text.replace("pgqrs_", f"{quoted}.pgqrs_")
