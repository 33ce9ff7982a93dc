-- What the sandbox that an image was made of could reach, which a start from
-- that image goes on with. JSON, '' for images that are plain or older.

-- +goose Up
ALTER TABLE images ADD COLUMN network TEXT NOT NULL DEFAULT '';

-- +goose Down
ALTER TABLE images DROP COLUMN network;
