-- Times are nanoseconds since 1970 UTC, 0 = never. Durations are nanoseconds.

CREATE TABLE sandbox (
    id                TEXT PRIMARY KEY,
    team              TEXT NOT NULL,
    project           TEXT NOT NULL,
    name              TEXT NOT NULL,
    persistent        INTEGER NOT NULL,
    image             TEXT NOT NULL,
    image_id          TEXT NOT NULL,
    runtime           TEXT NOT NULL,
    user              TEXT NOT NULL,
    work_dir          TEXT NOT NULL,
    vcpus             INTEGER NOT NULL,
    memory_mib        INTEGER NOT NULL,
    timeout           INTEGER NOT NULL,
    ports             TEXT NOT NULL,    -- JSON array
    env               BLOB,             -- sealed JSON object; NULL = empty
    region            TEXT NOT NULL,
    policy            TEXT NOT NULL,    -- JSON object
    session_id        TEXT NOT NULL REFERENCES session (id) DEFERRABLE INITIALLY DEFERRED,
    created_at        INTEGER NOT NULL,
    updated_at        INTEGER NOT NULL,
    state_at          INTEGER NOT NULL, -- of the latest session
    total_cpu         INTEGER NOT NULL,
    total_duration    INTEGER NOT NULL,
    total_egress      INTEGER NOT NULL, -- bytes
    total_ingress     INTEGER NOT NULL, -- bytes
    deleted_at        INTEGER NOT NULL DEFAULT 0
) STRICT;

-- A deleted sandbox stays for its sessions' accounting, without its secrets,
-- and leaves its name at once.
CREATE UNIQUE INDEX sandbox_name ON sandbox (team, project, name) WHERE deleted_at = 0;
CREATE INDEX sandbox_created ON sandbox (team, project, created_at, id) WHERE deleted_at = 0;
CREATE INDEX sandbox_state ON sandbox (team, project, state_at, id) WHERE deleted_at = 0;
CREATE INDEX sandbox_image ON sandbox (image_id) WHERE deleted_at = 0;

CREATE TABLE tag (
    sandbox_id        TEXT NOT NULL REFERENCES sandbox (id) ON DELETE CASCADE,
    key               TEXT NOT NULL,
    value             TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE session (
    id                TEXT PRIMARY KEY,
    sandbox_id        TEXT NOT NULL REFERENCES sandbox (id),
    team              TEXT NOT NULL,
    project           TEXT NOT NULL,
    state             TEXT NOT NULL,
    cause             TEXT NOT NULL,
    image_id          TEXT NOT NULL,
    runtime           TEXT NOT NULL,
    user              TEXT NOT NULL,
    work_dir          TEXT NOT NULL,
    vcpus             INTEGER NOT NULL,
    memory_mib        INTEGER NOT NULL,
    timeout           INTEGER NOT NULL,
    region            TEXT NOT NULL,
    policy            TEXT NOT NULL,    -- JSON object
    requested_at      INTEGER NOT NULL,
    started_at        INTEGER NOT NULL,
    updated_at        INTEGER NOT NULL,
    stop_requested_at INTEGER NOT NULL,
    ended_at          INTEGER NOT NULL,
    cpu               INTEGER NOT NULL,
    duration          INTEGER NOT NULL,
    egress            INTEGER NOT NULL, -- bytes
    ingress           INTEGER NOT NULL  -- bytes
) STRICT;

-- The database itself holds every sandbox to one live session.
CREATE UNIQUE INDEX session_live ON session (sandbox_id) WHERE state NOT IN ('stopped', 'failed', 'aborted');
CREATE INDEX session_sandbox ON session (sandbox_id, requested_at, id);
CREATE INDEX session_requested ON session (team, project, requested_at, id);

CREATE TABLE token (
    id                TEXT PRIMARY KEY,
    team              TEXT NOT NULL,
    project           TEXT NOT NULL,
    hash              BLOB NOT NULL UNIQUE,
    created_at        INTEGER NOT NULL
) STRICT;

CREATE TABLE image (
    id                TEXT PRIMARY KEY,
    name              TEXT NOT NULL,
    digest            TEXT NOT NULL,
    size              INTEGER NOT NULL, -- bytes
    files             INTEGER NOT NULL,
    created_at        INTEGER NOT NULL,
    config            TEXT NOT NULL     -- JSON object
) STRICT;

-- One row: a known text under the key of the sealed columns, which tells a
-- wrong key from a damaged value.
CREATE TABLE seal_check (
    id                INTEGER PRIMARY KEY CHECK (id = 1),
    sealed            BLOB NOT NULL
) STRICT;
