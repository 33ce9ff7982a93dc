// Package ca is the certificate authority of one installation: a directory
// with its own certificate and key, and a certificate for each role. It makes
// and renews them; package mtls reads and uses them. It revokes nothing: who
// loses a role's key makes a new authority.
package ca

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kernflux/opendsec/internal/mtls"
)

// How long certificates last. The authority's is renewed with the same key,
// so that those who hold the older one go on to be understood until it ends.
const (
	caLife    = 10 * 365 * 24 * time.Hour
	caRenew   = 2 * 365 * 24 * time.Hour // before its end
	leafLife  = 825 * 24 * time.Hour     // the most that some TLS clients accept
	leafRenew = 30 * 24 * time.Hour      // before its end
	backdate  = time.Hour                // for clocks that are behind
)

// CA is an authority that is open.
type CA struct {
	dir  string
	now  time.Time
	cert *x509.Certificate
	pem  []byte
	key  crypto.Signer
}

// Init opens the authority in the directory, and makes it when it is not
// there. It renews the authority's certificate in time. Two programs may do so
// at once.
func Init(dir string) (*CA, error) { return open(dir, time.Now()) }

func open(dir string, now time.Time) (*CA, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of the certificate authority: %w", err)
	}
	unlock, err := lock(dir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	c := &CA{dir: dir, now: now}
	if err := c.loadKey(); err != nil {
		return nil, err
	}
	if err := c.loadCert(); err != nil {
		return nil, err
	}
	return c, nil
}

// CertFile returns the path of the authority's certificate, which is no secret:
// clients verify servers with it.
func (c *CA) CertFile() string { return mtls.CAFile(c.dir) }

func (c *CA) keyFile() string { return filepath.Join(c.dir, "ca-key.pem") }

func (c *CA) loadKey() error {
	data, err := os.ReadFile(c.keyFile())
	if errors.Is(err, fs.ErrNotExist) {
		return c.makeKey()
	}
	if err != nil {
		return fmt.Errorf("read the authority's key: %w", err)
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return fmt.Errorf("%s holds no key in PEM; restore it, or remove the directory to begin with a new authority", c.keyFile())
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return fmt.Errorf("%s: %w", c.keyFile(), err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return fmt.Errorf("%s: a key of type %T cannot sign", c.keyFile(), key)
	}
	c.key = signer
	return nil
}

func (c *CA) makeKey() error {
	if _, err := os.Stat(c.CertFile()); err == nil {
		return fmt.Errorf("%s is there but %s is not; restore it, or remove the directory to begin with a new authority", c.CertFile(), c.keyFile())
	}
	key, keyPEM, err := newKey()
	if err != nil {
		return err
	}
	c.key = key
	return write(c.keyFile(), keyPEM, 0o600)
}

// loadCert reads the authority's certificate. When it is missing, or ends
// soon, the key signs a new one.
func (c *CA) loadCert() error {
	data, err := os.ReadFile(c.CertFile())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read the authority's certificate: %w", err)
	}
	if err == nil {
		cert, err := parse(data)
		if err != nil {
			return fmt.Errorf("%s: %w", c.CertFile(), err)
		}
		if !samePublicKey(cert.PublicKey, c.key.Public()) {
			return fmt.Errorf("%s does not belong to %s; restore them, or remove the directory to begin with a new authority", c.CertFile(), c.keyFile())
		}
		if c.now.Add(caRenew).Before(cert.NotAfter) {
			c.cert, c.pem = cert, data
			return nil
		}
	}
	return c.makeCert()
}

func (c *CA) makeCert() error {
	serial, err := newSerial()
	if err != nil {
		return err
	}
	tmpl := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "OpenDsec authority"},
		NotBefore:    c.now.Add(-backdate), NotAfter: c.now.Add(caLife),
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		IsCA:     true, BasicConstraintsValid: true, MaxPathLenZero: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, c.key.Public(), c.key)
	if err != nil {
		return fmt.Errorf("sign the authority's certificate: %w", err)
	}
	c.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if c.cert, err = x509.ParseCertificate(der); err != nil {
		return fmt.Errorf("read the authority's certificate back: %w", err)
	}
	return write(c.CertFile(), c.pem, 0o644)
}

// Issue makes a certificate with a new key for a role, good for servers at the
// hosts (names or IP addresses) and for clients. Nothing is kept.
func (c *CA) Issue(role string, hosts []string) (certPEM, keyPEM []byte, err error) {
	if role == "" || strings.ContainsAny(role, "/\\?#% \t\n") {
		return nil, nil, fmt.Errorf("role %q: want a plain word", role)
	}
	uri, err := url.Parse(mtls.RoleURI(role))
	if err != nil {
		return nil, nil, fmt.Errorf("role %q: %w", role, err)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, nil, err
	}
	end := c.now.Add(leafLife)
	if end.After(c.cert.NotAfter) {
		end = c.cert.NotAfter
	}
	tmpl := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "OpenDsec " + role},
		NotBefore:    c.now.Add(-backdate), NotAfter: end,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		URIs:                  []*url.URL{uri},
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			tmpl.IPAddresses = append(tmpl.IPAddresses, ip)
		} else {
			tmpl.DNSNames = append(tmpl.DNSNames, h)
		}
	}
	key, keyPEM, err := newKey()
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, c.cert, key.Public(), c.key)
	if err != nil {
		return nil, nil, fmt.Errorf("sign a certificate for role %s and hosts %v: %w", role, hosts, err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), keyPEM, nil
}

// Ensure sees to it that the role's certificate, as mtls.Load reads it, is in
// the authority's directory, holds for all the hosts, and lasts for 30 days
// more. It is to be called at each start.
func (c *CA) Ensure(role string, hosts []string) error {
	unlock, err := lock(c.dir)
	if err != nil {
		return err
	}
	defer unlock()
	file := mtls.RoleFile(c.dir, role)
	if c.good(file, role, hosts) {
		return nil
	}
	certPEM, keyPEM, err := c.Issue(role, hosts)
	if err != nil {
		return err
	}
	// One file for both, so that no crash leaves a certificate with another key.
	return write(file, slices.Concat(certPEM, keyPEM), 0o600)
}

// good reports whether the file needs no new certificate.
func (c *CA) good(file, role string, hosts []string) bool {
	data, err := os.ReadFile(file)
	if err != nil {
		return false
	}
	id, err := mtls.New(c.pem, data, data)
	if err != nil || id.Role() != role {
		return false
	}
	cert, err := parse(data)
	if err != nil || cert.CheckSignatureFrom(c.cert) != nil || c.now.Add(leafRenew).After(cert.NotAfter) {
		return false
	}
	for _, h := range hosts {
		if cert.VerifyHostname(h) != nil {
			return false
		}
	}
	return true
}

func newKey() (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make a key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("encode a key: %w", err)
	}
	return key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

func newSerial() (*big.Int, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("draw a serial number: %w", err)
	}
	return serial, nil
}

func parse(data []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(data)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, errors.New("no certificate in PEM")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("read the certificate: %w", err)
	}
	return cert, nil
}

func samePublicKey(a, b crypto.PublicKey) bool {
	k, ok := a.(interface{ Equal(crypto.PublicKey) bool })
	return ok && k.Equal(b)
}
