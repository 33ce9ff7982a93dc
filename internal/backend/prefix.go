package backend

import (
	"crypto/sha256"
	"encoding/hex"
)

// Prefix returns what the names of everything that one edge makes on the host
// begin with: network namespaces, links, cgroups. It follows from the edge's
// state directory, so two edges on one machine never touch each other's
// things, and an edge started again finds its own.
func Prefix(stateDir string) string {
	sum := sha256.Sum256([]byte(stateDir))
	return "od" + hex.EncodeToString(sum[:3])
}
