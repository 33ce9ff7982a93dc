// Package mtls lets components know each other by role. A component's
// certificate names its role in a URI, both ends of a connection show one, and
// each service lists the roles that may call it; what is not listed is refused.
// Certificates are made by package ca. Callers of the public API have no
// certificate but a token, which is not this package's matter.
package mtls

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// The roles of components.
const (
	RoleAPIServer = "apiserver"
	RoleIAM       = "iam"
	RoleWatcher   = "watcher"
	RoleEdge      = "edge"
	RoleE2B       = "e2b"
)

const rolePrefix = "opendsec://role/"

// RoleURI returns the URI that names a role in a certificate.
func RoleURI(role string) string { return rolePrefix + role }

// CAFile returns the path of the authority's certificate in a directory of
// package ca.
func CAFile(dir string) string { return filepath.Join(dir, "ca.pem") }

// RoleFile returns the path of a role's certificate and key, one PEM file, in
// a directory of package ca.
func RoleFile(dir, role string) string { return filepath.Join(dir, role+".pem") }

// Identity is what a component shows of itself and whom it believes.
type Identity struct {
	role string
	cert tls.Certificate
	pool *x509.CertPool
}

// Load reads the identity of a role from a directory of package ca.
func Load(dir, role string) (*Identity, error) {
	caPEM, err := os.ReadFile(CAFile(dir))
	if err != nil {
		return nil, fmt.Errorf("read the certificate authority: %w", err)
	}
	pair, err := os.ReadFile(RoleFile(dir, role))
	if err != nil {
		return nil, fmt.Errorf("read the certificate of role %s: %w", role, err)
	}
	id, err := New(caPEM, pair, pair)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", RoleFile(dir, role), err)
	}
	if id.role != role {
		return nil, fmt.Errorf("%s: the certificate names role %q, want %q", RoleFile(dir, role), id.role, role)
	}
	return id, nil
}

// New makes an identity of an authority's certificate, and a certificate of
// it with its key, all in PEM.
func New(caPEM, certPEM, keyPEM []byte) (*Identity, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(caPEM) {
		return nil, errors.New("the certificate authority's file holds no certificate in PEM")
	}
	cert, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("read the certificate and its key: %w", err)
	}
	role, err := roleOfCert(cert.Leaf)
	if err != nil {
		return nil, err
	}
	return &Identity{role: role, cert: cert, pool: pool}, nil
}

// Role returns the identity's own role.
func (id *Identity) Role() string { return id.role }

// ServerConfig is for a listener that only components reach: each must show a
// certificate of the authority that names a role. Which roles a service
// answers is said by Handler.
func (id *Identity) ServerConfig() *tls.Config {
	cfg := id.PublicConfig()
	cfg.ClientAuth = tls.RequireAndVerifyClientCert
	cfg.ClientCAs = id.pool
	cfg.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := roleOfCert(cs.PeerCertificates[0])
		return err
	}
	return cfg
}

// PublicConfig is for a listener that people reach: it asks for no
// certificate.
func (id *Identity) PublicConfig() *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{id.cert},
		NextProtos:   []string{"h2", "http/1.1"},
	}
}

// ClientConfig is for calls to a component of the role. The far side's
// certificate must be of the authority, for the name that was dialled, and
// name that role.
func (id *Identity) ClientConfig(serverRole string) *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{id.cert},
		RootCAs:      id.pool,
		VerifyConnection: func(cs tls.ConnectionState) error {
			role, err := roleOfCert(cs.PeerCertificates[0])
			if err != nil {
				return err
			}
			if role != serverRole {
				return fmt.Errorf("the server's certificate names role %q, want %q", role, serverRole)
			}
			return nil
		},
	}
}

// roleOfCert returns the one role that a certificate names.
func roleOfCert(cert *x509.Certificate) (string, error) {
	var roles []string
	for _, u := range cert.URIs {
		if role, ok := strings.CutPrefix(u.String(), rolePrefix); ok && role != "" {
			roles = append(roles, role)
		}
	}
	if len(roles) != 1 {
		return "", fmt.Errorf("the certificate %q names %d roles, want one", cert.Subject.CommonName, len(roles))
	}
	return roles[0], nil
}

// Allow says who may call what. A key is a service ("iam.v1.Auth"), one
// procedure of it ("iam.v1.Auth/Authenticate"), or a path ending in a slash,
// with all below it ("/sandboxes/"). The longest key that fits decides; what
// fits none, or has an empty list, is refused.
type Allow map[string][]string

// roles returns the roles that may ask for a path.
func (a Allow) roles(path string) []string {
	best, roles := -1, []string(nil)
	for key, list := range a {
		prefix := "/" + strings.TrimPrefix(key, "/")
		fits := path == prefix || strings.HasPrefix(path, strings.TrimSuffix(prefix, "/")+"/")
		if fits && len(prefix) > best {
			best, roles = len(prefix), list
		}
	}
	return roles
}

// Allows reports whether the role may ask for the path.
func (a Allow) Allows(role, path string) bool {
	return role != "" && slices.Contains(a.roles(path), role)
}
