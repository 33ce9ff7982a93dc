package store

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
)

// secretSize is the length of a secret, in bytes.
const secretSize = 32

// Secret returns the installation's secret of a name, 32 bytes that are the same
// for all who ask. It is made when first asked for.
func (db *DB) Secret(ctx context.Context, name string) ([]byte, error) {
	fresh := make([]byte, secretSize)
	_, _ = rand.Read(fresh) // never fails
	_, err := db.write.ExecContext(ctx, `INSERT INTO secrets (name, value) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING`,
		name, base64.StdEncoding.EncodeToString(fresh))
	if err != nil {
		return nil, fmt.Errorf("make the secret %s: %w", name, err)
	}
	var text string
	if err := db.write.QueryRowContext(ctx, `SELECT value FROM secrets WHERE name = $1`, name).Scan(&text); err != nil {
		return nil, fmt.Errorf("read the secret %s: %w", name, err)
	}
	value, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(value) != secretSize {
		return nil, fmt.Errorf("the secret %s in the database is not %d bytes of base64: delete its row in the table secrets to have another made", name, secretSize)
	}
	return value, nil
}
