-- Keys that the installation signs with. They are the same for all servers on
-- the database, and made when first used.

-- +goose Up
CREATE TABLE secrets (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL -- base64
);

-- +goose Down
DROP TABLE secrets;
