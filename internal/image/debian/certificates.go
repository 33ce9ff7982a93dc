package debian

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// trust is where a machine keeps its root certificates.
type trust struct {
	bundle string // all that it trusts
	local  string // those that its admin added
	stock  string // those of the distribution
}

var machineCertificates = trust{
	bundle: bundle,
	local:  "/usr/local/share/ca-certificates",
	stock:  "/usr/share/ca-certificates",
}

// writeExtraCertificates writes the certificates that the machine trusts
// beyond its distribution's into dir, one a file, named after their content.
func writeExtraCertificates(t trust, dir string) error {
	local, err := certificatesBelow(t.local)
	if err != nil {
		return err
	}
	stock, err := certificatesBelow(t.stock)
	if err != nil {
		return err
	}
	all, err := certificatesOf(t.bundle)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	extra := local
	for sum, der := range all {
		if _, known := stock[sum]; !known {
			extra[sum] = der
		}
	}
	for sum, der := range extra {
		name := filepath.Join(dir, "machine-"+hex.EncodeToString(sum[:8])+".crt")
		b := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
		if err := os.WriteFile(name, b, 0o644); err != nil {
			return fmt.Errorf("write a root certificate: %w", err)
		}
	}
	return nil
}

// certificatesBelow returns the certificates of all .crt files in a directory
// tree. One that does not exist has none.
func certificatesBelow(dir string) (map[[32]byte][]byte, error) {
	all := map[[32]byte][]byte{}
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(name) != ".crt" {
			return err
		}
		some, err := certificatesOf(name)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // a link to nothing
		}
		for sum, der := range some {
			all[sum] = der
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read root certificates in %s: %w", dir, err)
	}
	return all, nil
}

// certificatesOf returns the certificates of a PEM file, by the digest of
// their content. What is no certificate is left out.
func certificatesOf(file string) (map[[32]byte][]byte, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read root certificates: %w", err)
	}
	all := map[[32]byte][]byte{}
	for {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			return all, nil
		}
		if block.Type != "CERTIFICATE" && block.Type != "TRUSTED CERTIFICATE" {
			continue
		}
		if cert, err := x509.ParseCertificate(block.Bytes); err == nil {
			all[sha256.Sum256(cert.Raw)] = cert.Raw
		}
	}
}
